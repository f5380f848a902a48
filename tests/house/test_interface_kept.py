"""Public names stay as they are: each in `interface.txt` is where it was, and takes the arguments that it took."""

import ast
import importlib
import inspect
import re
from pathlib import Path

import pytest

LINES = [line for line in (Path(__file__).parent / "interface.txt").read_text("utf-8").splitlines() if line[:1] != "#"]


def found(path):
    """The object at a dotted path, modules imported on the way."""
    parts = path.split(".")
    there = importlib.import_module(parts[0])
    for i, name in enumerate(parts[1:], 2):
        if not hasattr(there, name):
            importlib.import_module(".".join(parts[:i]))
        there = getattr(there, name)
    return there


def differences(path, arguments, now):
    """What a caller who knows the old arguments would run into."""
    then = ast.parse(f"def f({re.sub('<[^>]*>', '...', arguments)}): ...").body[0].args
    parameters = [p for p in now.parameters.values() if p.name != "self"]
    positional = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    by_name = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    old = [a.arg for a in (*then.posonlyargs, *then.args)]
    if positional[: len(old)] != old:
        yield f"{path} took ({', '.join(old)}) by position, and takes ({', '.join(positional)})"
    if lost := {a.arg for a in (*then.args, *then.kwonlyargs)} - by_name:
        yield f"{path} no longer takes {', '.join(sorted(lost))} by name"
    for star, kind in ((then.vararg, "VAR_POSITIONAL"), (then.kwarg, "VAR_KEYWORD")):
        if star and not any(p.kind.name == kind for p in parameters):
            yield f"{path} no longer takes any number of {star.arg}"
    defaults = dict(zip(reversed(old), reversed(then.defaults), strict=False))
    defaults |= dict(zip((a.arg for a in then.kwonlyargs), then.kw_defaults, strict=True))
    for p in parameters:
        was = defaults.get(p.name)
        if was is not None and ast.unparse(was) not in ("...", repr(p.default)):
            yield f"{path}: the default of {p.name} was {ast.unparse(was)}, and is {p.default!r}"
        if p.name not in old and p.name not in defaults and p.default is p.empty and not p.kind.name.startswith("VAR"):
            yield f"{path} needs {p.name}, which earlier code does not give"


@pytest.mark.parametrize("line", LINES, ids=lambda line: line.partition("(")[0])
def test_every_public_name_takes_what_it_took(line):
    path, call, arguments = line.partition("(")
    there = found(path)
    if call:
        assert list(differences(path, arguments.removesuffix(")"), inspect.signature(there))) == []


@pytest.mark.parametrize(
    ("now", "message"),
    [
        (lambda y, *, c=1: 0, "by position"),
        (lambda x, z, c=1: 0, "needs z"),
        (lambda x: 0, "no longer takes c by name"),
        (lambda x, /, *, c=1: 0, "no longer takes x by name"),
        (lambda x, *, c=2: 0, "the default of c was 1, and is 2"),
    ],
)
def test_a_changed_argument_is_found(now, message):
    assert any(message in said for said in differences("f", "x, *, c=1", inspect.signature(now)))
    assert not list(differences("f", "x, *, c=1", inspect.signature(lambda x, *, c=1, more=0: 0)))
