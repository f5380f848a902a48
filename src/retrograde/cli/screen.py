"""The console of all commands: results go to stdout, progress to stderr and to terminals alone."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from .._base.report import as_json, save

WIDTH = 130  # where there is no terminal to ask


def console(*, stderr: bool = False) -> Console:
    """Without colours, markup of a terminal and wrapping to its width where there is none."""
    found = Console(stderr=stderr, highlight=False)
    return found if found.is_terminal else Console(stderr=stderr, highlight=False, no_color=True, width=WIDTH)


def keep(path: Path | None, report: Any) -> bool:
    """Write the report as JSON where a path is given; - is stdout, and then (True) nothing else belongs there."""
    if path is None:
        return False
    if str(path) == "-":
        sys.stdout.write(as_json(report))
        return True
    save(path, report)
    return False


_CONTROLS = dict.fromkeys([*range(32), *range(127, 160)], "\ufffd") | {ord(c): c for c in "\n\t"}


def harmless(text: str) -> str:
    """What a model wrote, without the characters by which it could command a terminal.

    >>> harmless("a\\tb\\x1b[2J")
    'a\\tb�[2J'
    """
    return text.translate(_CONTROLS)


def progress() -> Progress:
    """A bar on stderr that is gone when the work is done; nothing at all where stderr is no terminal."""
    where = console(stderr=True)
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    return Progress(*columns, console=where, transient=True, disable=not where.is_terminal)
