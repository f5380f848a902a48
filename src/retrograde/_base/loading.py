"""Functions that users name on the command line, as "module:function": found, called with sizes, and their errors in one line."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


class Refused(Exception):
    """Arguments or input that cannot be used. The message is one line: what is wrong, and the way out."""


def load(spec: str, option: str) -> Callable[..., Any]:
    """The function that "module:function" names; modules of the current directory are found too.

    >>> load("math:sqrt", "--block")(9)
    3.0
    """
    module_name, colon, name = spec.partition(":")
    if not (module_name and colon and name):
        raise Refused(f"{option} {spec!r} is not of the form module:function")
    if "/" in module_name or "\\" in module_name or module_name.endswith(".py"):
        path = Path(module_name)
        instead = ("" if path.parent == Path() else f"cd {path.parent} and ") + f"write {path.name.removesuffix('.py')}:{name}"
        raise Refused(f"{option} {spec}: {module_name} is a path, not a module: {instead}")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name and f"{module_name}.".startswith(f"{error.name}."):
            raise Refused(f"{option} {spec}: no module {error.name!r}, neither here nor installed") from error
        raise Refused(f"{option} {spec}: importing {module_name} fails: {one_line(error)}") from error
    except Exception as error:
        raise Refused(f"{option} {spec}: importing {module_name} fails: {one_line(error)}") from error
    for part in name.split("."):
        if not hasattr(found, part):
            raise Refused(f"{option} {spec}: {module_name} has no {name!r}")
        found = getattr(found, part)
    if not callable(found):
        raise Refused(f"{option} {spec} is {kind_of(found)}, not a function")
    return found


def called(spec: str, option: str, factory: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What the factory returns; an exception of its own is reported in one line."""
    try:
        return factory(*args, **kwargs)
    except Exception as error:
        raise Refused(f"{option} {spec} raises {one_line(error)}") from error


def sized(spec: str, option: str, factory: Callable[..., Any], sizes: dict[str, int]) -> Callable[[], Any]:
    """Calls the factory with those of the sizes that its signature names; another parameter, if there is one, is the width."""
    try:
        parameters = inspect.signature(factory).parameters.values()
    except ValueError:  # built in: its parameters are not known
        parameters = ()
    one_by_one = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    named = {p.name: sizes[p.name] for p in one_by_one if p.name in sizes and p.kind != p.POSITIONAL_ONLY and not _own(p)}
    others = [p for p in one_by_one if p.default is p.empty and p.name not in named]
    if len(others) > 1 or (others and "dim" in named):
        raise Refused(
            f"{option} {spec} takes ({', '.join(p.name for p in one_by_one)}): it may take nothing, one argument of any name, "
            f"which is the width, and arguments named {', '.join(list(sizes)[:-1])} or {list(sizes)[-1]}"
        )
    if others and others[0].kind != inspect.Parameter.POSITIONAL_ONLY:
        return lambda: called(spec, option, factory, **{others[0].name: sizes["dim"]}, **named)
    return lambda: called(spec, option, factory, *(sizes["dim"] for _ in others), **named)


def _own(parameter: inspect.Parameter) -> bool:
    """A number of heads that the factory has already is its own: it goes with its own width."""
    return parameter.name == "heads" and parameter.default is not parameter.empty


def kind_of(thing: object) -> str:
    """The type of a thing, in a sentence.

    >>> kind_of(3), kind_of("x")
    ('an int', 'a str')
    """
    name = type(thing).__name__
    return f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"


def one_line(error: BaseException, width: int = 200) -> str:
    """An exception in one short line."""
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    text = f"{type(error).__name__}: {first}" if first else type(error).__name__
    return text if len(text) <= width else f"{text[: width - 1]}…"
