"""The `retrograde` command: how it is called, and what it says when it is called in a way that cannot be."""

import json
import os
import subprocess
import sys
import types
from dataclasses import dataclass

import pytest
from support import environment, loaded_by, retrograde_command

import retrograde
from retrograde._base.given import at_least, byte_size, writable
from retrograde._base.loading import Refused, called, load, one_line
from retrograde._base.report import as_json, size
from retrograde.cli import app


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"]], ids=str)
def test_lists_its_commands(arguments, capsys):
    assert app.main(arguments) == 0
    said = capsys.readouterr().out
    for name in app.COMMANDS:
        assert f"\n  {name}" in said


def test_version():
    done = retrograde_command("--version")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"retrograde {retrograde.__version__}\n", "")


@pytest.mark.parametrize("name", app.COMMANDS)
def test_every_command_has_help_without_colours(name, launcher):
    done = launcher.run(name, "--help")
    assert done.rc == 0
    assert "--help" in done.out
    assert "--json" in done.out
    assert "\x1b" not in done.out + done.err
    assert "None" not in done.out
    assert max(map(len, done.out.splitlines())) <= 80


@pytest.mark.parametrize("name", app.COMMANDS)
def test_every_command_has_its_version(name, capsys):
    assert app.main([name, "--version"]) == 0
    assert capsys.readouterr().out == f"retrograde {retrograde.__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["fly"], "there is no command 'fly', use one of: bench"),
        (["--fast"], "there is no command '--fast'"),
        (["benhc"], "there is no command 'benhc', use one of: bench, plan, train, sample, check, drift, did you mean bench?"),
        (["bench", "--fast"], "there is no option --fast (see retrograde bench --help)"),
        (["bench", "--dept", "3"], "there is no option --dept, did you mean --depth? (see retrograde bench --help)"),
        (["bench", "--dept=3"], "there is no option --dept, did you mean --depth?"),
        (["bench", "twice"], "'twice' is one argument too many (see retrograde bench --help)"),
        (["drift", "block:attn"], "'block:attn' is one argument too many, give it with --block (see retrograde drift --help)"),
        (["bench", "block:attn"], "'block:attn' is one argument too many, give it with --block (see"),
        (["bench", "--depth"], "--depth needs a value"),
        (["train", "--width", "wide"], "--dim 'wide' is not a whole number (see retrograde train --help)"),
        (["train", "--lr", "fast"], "--lr 'fast' is not a number (see retrograde train --help)"),
        (["train", "--precision", "bf61"], "--dtype 'bf61' is not one of: auto, float32, bf16, bfloat16, did you mean bf16?"),
        (["bench", "--plot", "x.foo"], "--plot x.foo: pictures end in .png, .svg or .pdf"),
        (["train", "--plot", "x.foo"], "--plot x.foo: pictures end in .png, .svg or .pdf"),
    ],
)
def test_refusals(arguments, message, capsys):
    assert app.main(arguments) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith(f"retrograde: {message}")
    assert said.err.count("\n") == 1


def test_a_refusal_in_a_process_that_cannot_draw_lines():
    """tyro draws another box there."""
    command = [sys.executable, "-m", "retrograde", "bench", "--depth", "two"]
    env = environment() | {"PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    said = "retrograde: --depth 'two' is not a whole number (see retrograde bench --help)\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", said)


@pytest.fixture
def command(monkeypatch):
    """Puts a command of our own under the name `try`."""

    @dataclass
    class Options:
        """Try it."""

        times: int = 1

    def put(run):
        module = types.ModuleType("retrograde.cli.try")
        module.Options, module.run = Options, run
        monkeypatch.setitem(sys.modules, "retrograde.cli.try", module)
        monkeypatch.setitem(app.COMMANDS, "try", "tries")

    return put


def raises(error):
    def run(options):
        raise error

    return run


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (Refused("a\nlong   story"), 2, "retrograde: a long story\n"),
        (KeyboardInterrupt(), 130, "retrograde: interrupted\n"),
        (ModuleNotFoundError("No module", name="matplotlib.figure"), 2, "pip install 'retrograde[cli]'\n"),
    ],
)
def test_what_ends_a_command_is_one_line(error, code, line, command, capsys):
    command(raises(error))
    assert app.main(["try"]) == code
    said = capsys.readouterr().err
    assert said.endswith(line)
    assert said.count("\n") == 1


def test_faults_are_not_hidden(command):
    """An error of ours keeps its traceback."""
    command(raises(ModuleNotFoundError("No module", name="retrograde.nothing")))
    with pytest.raises(ModuleNotFoundError):
        app.main(["try"])


def test_options_and_exit_code(command, capsys):
    command(lambda options: options.times)
    assert app.main(["try", "--times", "3"]) == 3
    assert app.main(["try", "--times", "x"]) == 2
    assert "--times 'x' is not a whole number" in capsys.readouterr().err


@pytest.mark.parametrize("package", ["tyro", "rich"])
def test_missing_extra(package, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, package, None)
    for name in [name for name in sys.modules if name.startswith(("retrograde.cli.bench", "retrograde.cli.screen", "rich."))]:
        monkeypatch.delitem(sys.modules, name)
    assert app.main(["bench"]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"retrograde: the command needs {package}")
    assert said.endswith(": pip install 'retrograde[cli]'\n")


def test_a_closed_pipe_is_no_fault():
    """As in `retrograde … | head`."""
    env = environment() | {"PYTHONUNBUFFERED": ""}
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run([sys.executable, "-m", "retrograde"], stdout=write, stderr=subprocess.PIPE, env=env, check=False)
    os.close(write)
    assert (done.returncode, done.stderr) == (1, b"")


def test_help_and_version_load_no_command():
    loaded = loaded_by("import retrograde.cli.app as app", "app.main(['--version'])")
    assert not loaded & {"tyro", "rich", "matplotlib", "retrograde.cli.bench", "retrograde.bench"}


FACTORIES = """
from torch import nn
WIDTH = 4
class Blocks:
    @staticmethod
    def good():
        return nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
def bad():
    raise RuntimeError("out of\\nluck")
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    """The current directory, with modules in it."""
    for name, text in {"factories": FACTORIES, "broken": "import nowhere_at_all", "unread": "def f(:"}.items():
        (tmp_path / f"{name}.py").write_text(text)
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return tmp_path


def test_load_finds_modules_here(here):
    f, _ = called("factories:Blocks.good", "--block", load("factories:Blocks.good", "--block"))
    assert f.in_features == 4


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("factories", "'factories' is not of the form module:function"),
        (":good", "is not of the form module:function"),
        ("/x/factories.py:good", "/x/factories.py is a path, not a module: cd /x and write factories:good"),
        ("factories.py:good", "factories.py is a path, not a module: write factories:good"),
        ("nowhere:good", "no module 'nowhere'"),
        ("factories.deeper:good", "factories.deeper"),
        ("factories:better", "factories has no 'better'"),
        ("factories:WIDTH", "is an int, not a function"),
        ("broken:good", "importing broken fails: ModuleNotFoundError: No module named 'nowhere_at_all'"),
        ("unread:good", "importing unread fails: SyntaxError"),
    ],
)
def test_load_says_what_is_wrong(spec, message, here):
    with pytest.raises(Refused, match="--block") as refused:
        load(spec, "--block")
    assert message in str(refused.value)


def test_a_factory_that_raises(here):
    with pytest.raises(Refused, match="--block factories:bad raises RuntimeError: out of"):
        called("factories:bad", "--block", load("factories:bad", "--block"))


def test_exceptions_in_a_line():
    assert one_line(ValueError("\n\n one\ntwo")) == "ValueError: one"
    assert one_line(ValueError()) == "ValueError"
    assert len(one_line(ValueError("x" * 999))) == 200


@pytest.mark.parametrize(
    ("text", "size"),
    [("1", 1), ("3GiB", 3 * 2**30), ("512 mib", 512 * 2**20), ("1.5GB", 1_500_000_000), ("2kB", 2000), ("7b", 7)],
)
def test_sizes(text, size):
    assert byte_size(text, "--budget") == size


@pytest.mark.parametrize("text", ["", "GiB", "3 XiB", "-1", "1.5", "1e9", "nan", "0", "0MiB"])
def test_no_sizes(text):
    with pytest.raises(Refused, match="--budget"):
        byte_size(text, "--budget")


def test_sizes_in_words():
    assert [size(n) for n in (0, 1 << 10, 1 << 20, 5 << 29)] == ["0.0 MiB", "1.0 KiB", "1.0 MiB", "2.50 GiB"]


def test_json_has_no_infinity():
    assert json.loads(as_json({"a": float("inf"), "b": [1.5, float("nan")]})) == {"a": None, "b": [1.5, None]}


def test_paths_and_counts(tmp_path):
    writable(None, "--json")
    writable(tmp_path / "new.json", "--json")
    with pytest.raises(Refused, match="is a directory"):
        writable(tmp_path, "--json")
    with pytest.raises(Refused, match="there is no directory"):
        writable(tmp_path / "no" / "new.json", "--json")
    with pytest.raises(Refused, match="--few-things must be 2 or more, got 1"):
        at_least(2, few_things=1)
