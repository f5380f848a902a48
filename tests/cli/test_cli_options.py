"""Options of all commands: each has one name, old names work as they did, and errors of the user's own code can be seen whole."""

import dataclasses
import sys
from importlib import import_module

import pytest

from retrograde.cli import app
from retrograde.cli.parse import parsed

SHARED = "--dim 8 --heads 2 --seq 4 --batch 2 --shape=2,4,8 --device cpu --seed 1 --json r.json --plot p.png"
TAKEN = {  # every option that a command has ever had, with a value
    "bench": f"""{SHARED} --block a:b --depth=2,4 --dtype float64 --autocast none --variants=reverse,ordinary --budget 1MiB
        --rounds 2 --profile --timeout 3 --plot-depth d.png""",
    "plan": """--block a:b --model a:b --dim 8 --heads 2 --seq 4 --batch 2 --shape=2,4,8 --depth 3 --dtype float16 --autocast none
        --device cpu --gpu-memory 1GiB --reserve 1MiB --optimizer sgd --grads kept --budget 1MiB --compile-budget 0.3 --devices 2
        --json r.json --plot p.png""",
    "train": """--out o --resume --data=a,b --depth 2 --width 8 --heads 2 --context 4 --streams 3 --bits 4 --dropout 0.1 --batch 2
        --accumulate 2 --steps 3 --lr 0.1 --warmup 1 --clip 0.5 --weight-decay 0.2 --step-in-backward --device cpu
        --precision bf16 --memory last:3 --arithmetic exact --compile --parallel ddp --seed 1 --windows 0 --look-every 2
        --save-every 2 --sample 5 --json r.json --plot p.png""",
    "sample": "run --prompt a=b --bytes 3 --temperature 0 --seed 1 --device cpu --json r.json",
    "check": f"{SHARED} a:b --depth 3 --dtype float64 --autocast none --memory reverse --arithmetic exact",
    "drift": f"{SHARED} --block a:b --depth=2,4 --dtype=float32,autocast-bfloat16 --arithmetic=float,exact",
}
NOW = {"--width": "dim", "--context": "seq", "--precision": "dtype"}
RENAMED = {"width", "context", "length", "precision", "net"}


def command(name):
    found = import_module(f"retrograde.cli.{name}")
    return found, getattr(found, "OLD_NAMES", {})


def words_of(text):
    """Several values stand behind one = here."""
    for word in text.split():
        option, equals, values = word.partition("=")
        yield from [option, *values.split(",")] if equals and option.startswith("--") else [word]


@pytest.mark.parametrize("name", TAKEN)
def test_every_option_of_old_is_taken(name):
    module, old_names = command(name)
    words = list(words_of(TAKEN[name]))
    options = parsed(module.Options, words, f"retrograde {name}", old_names)
    plain = module.Options()
    for word in words:
        if word.startswith("--"):
            field = NOW.get(word, word[2:].replace("-", "_"))
            assert getattr(options, field) != getattr(plain, field), word


@pytest.mark.parametrize("name", app.COMMANDS)
def test_the_same_thing_has_the_same_name_in_every_command(name):
    fields = {field.name for field in dataclasses.fields(command(name)[0].Options)}
    assert fields & RENAMED <= ({"net"} if name == "check" else set())  # the net of check may stand without a name
    assert ("block" in fields) == (name in ("bench", "plan", "check", "drift"))


def test_old_and_new_names_are_one():
    module, old_names = command("train")
    for old, new in old_names.items():
        value = "bf16" if new == "--dtype" else "24"
        found = [parsed(module.Options, words, "", old_names) for words in ([old, value], [f"{old}={value}"], [new, value])]
        assert found[0] == found[1] == found[2] != module.Options()


OWN = """
from torch import nn

class Fails(nn.Module):
    def forward(self, x):
        return helper(x)

def helper(x):
    raise ValueError("no luck")  # here

def failing(dim):
    return Fails(), nn.Linear(dim, dim)

def unmade(dim):
    raise ValueError("no luck")  # here
"""
SIZES = "--dim 4 --seq 2 --batch 2 --depth 2 --device cpu"


@pytest.fixture
def here(tmp_path, monkeypatch):
    (tmp_path / "own_blocks.py").write_text(OWN)
    monkeypatch.delitem(sys.modules, "own_blocks", raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")


@pytest.mark.parametrize(
    ("name", "block"),
    [
        ("check", "failing"),
        ("check", "unmade"),
        ("drift", "failing"),
        ("plan", "failing"),
        ("bench", "unmade"),
        ("bench", "failing"),
    ],
)
def test_the_traceback_of_an_error_in_code_of_the_user(name, block, here, capsys):
    """With --traceback the line that raises, through all that called it; without it one line."""
    command = [name, "--block", f"own_blocks:{block}", *SIZES.split()]
    if name == "bench":
        command += ["--rounds", "2", "--variants", "ordinary"]
    for asked in (True, False):
        assert app.main([*command, "--traceback"] if asked else command) == (1 if (name, block) == ("bench", "failing") else 2)
        said = capsys.readouterr()
        assert ('raise ValueError("no luck")  # here' in said.out + said.err) == asked
        assert ("in helper" in said.out + said.err) == (asked and block == "failing")
        assert "ValueError: no luck" in said.out + said.err


def test_check_takes_its_net_with_and_without_a_name(here, capsys):
    said = []
    for words in (["own_blocks:unmade"], ["--block", "own_blocks:unmade"], ["own_blocks:unmade", "--block", "a:b"], []):
        assert app.main(["check", *words]) == 2
        said.append(capsys.readouterr().err)
    assert said[0] == said[1] == "retrograde: check own_blocks:unmade raises ValueError: no luck\n"
    assert "are two nets to check, give one of them" in said[2]
    assert said[3] == "retrograde: MODULE:FACTORY is missing (see retrograde check --help)\n"
