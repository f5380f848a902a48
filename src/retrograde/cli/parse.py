"""Options from the command line, by tyro; what it has to say is brought down to one line in our words."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import io
import re
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from .._base.loading import Refused

WIDTH = 80  # of the text above the options
TAKES = {"INT": "a whole number", "FLOAT": "a number"}


def parsed(options: type, argv: Sequence[str], prog: str, old_names: Mapping[str, str] = {}) -> Any:
    """An instance of the dataclass `options`; Refused says in a line what cannot be read. `old_names` of options work as well."""
    import tyro

    argv = [f"{old_names.get(name, name)}{equals}{value}" for name, equals, value in (word.partition("=") for word in argv)]
    said, shown = io.StringIO(), _Shown()
    names = {f"--{field.name.replace('_', '-')}": field.name for field in dataclasses.fields(options)}
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(shown):
            found = tyro.cli(options, args=list(argv), prog=prog, config=(tyro.conf.FlagCreatePairsOff,))
    except SystemExit as left:
        if not left.code:
            sys.stdout.write(wrapped(shown.getvalue()))
            raise
        raise Refused(f"{in_our_words(_parts(said.getvalue()), list(names))} (see {prog} --help)") from None
    for option, name in names.items():
        if option in argv and getattr(found, name) == ():
            raise Refused(f"{option} needs a value (see {prog} --help)")
    return found


def nearest(word: str, known: Iterable[str]) -> str:
    """A question at the end of a line, if something known is much like the word.

    >>> nearest("--dept", ["--dim", "--depth"])
    ', did you mean --depth?'
    """
    found = difflib.get_close_matches(word, list(known), 1, 0.75)
    return f", did you mean {found[0]}?" if found else ""


def in_our_words(parts: list[str], names: list[str]) -> str:
    """What tyro says, part by part.

    >>> in_our_words(["Unrecognized options: --dept, 3"], ["--depth"])
    'there is no option --dept, did you mean --depth?'
    """
    said = parts[0]
    if match := re.match(r"Unrecognized options: (.*)", said):
        words = match[1].split(", ")
        option = next((word for word in words if word.startswith("--")), None)
        if option is None:
            takers = [name for name in ("--block", "--model") if name in names and ":" in words[0]]
            return f"{words[0]!r} is one argument too many{', give it with ' if takers else ''}{' or '.join(takers)}"
        option = option.partition("=")[0]
        return f"there is no option {option}{nearest(option, [*names, '--help', '--version'])}"
    if match := re.match(r"Error parsing (\S+): (.*)", said):
        value = (re.findall(r"'([^']*)'", match[2]) or [""])[-1]
        metavar = next((name for part in parts[1:] for name in TAKES if f" {name}" in part), None)
        return f"{match[1]} {value!r} is not {TAKES[metavar]}" if metavar else f"{match[1]}: {match[2]}"
    if match := re.match(r"invalid choice '(.*)' for argument '(\S+)'\. Expected one of (.*)", said):
        known = re.findall(r"'([^']*)'", match[3])
        return f"{match[2]} {match[1]!r} is not one of: {', '.join(known)}{nearest(match[1], known)}"
    if match := re.match(r"Missing value for argument '(\S+)'", said):
        return f"{match[1]} needs a value"
    if match := re.match(r"Missing from .*?: (\S+)", said):
        return f"{match[1]} is missing"
    return said


class _Shown(io.StringIO):
    """The help, with colours where there is a terminal to see them."""

    def __init__(self) -> None:
        super().__init__()
        self.real = sys.stdout

    @property
    def encoding(self) -> Any:  # type: ignore[override]
        return getattr(self.real, "encoding", None)

    def isatty(self) -> bool:
        return self.real.isatty()


def wrapped(shown: str) -> str:
    """The help with the text above the options as wide as these are: tyro leaves it in one line."""
    text, *options = re.split(r"(?m)^(?=[╭|]| *(?:positional arguments|options) *$)", shown, maxsplit=1)
    paragraphs = [textwrap.fill(" ".join(part.split()), WIDTH) for part in text.split("\n\n")]
    return "\n\n".join(paragraphs) + "".join(options)


def _parts(box: str) -> list[str]:
    """The text of tyro's box, rule by rule; without the title, where it is a row."""
    rows = [line.strip("│ ") for line in box.splitlines() if not line.startswith(("╭", "╰"))]
    parts = [" ".join(part.split()).rstrip(".") for part in re.split(r"[─-]{9,}", " ".join(rows))]
    return parts if "╭" in box or len(parts) < 2 else parts[1:]
