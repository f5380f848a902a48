"""The page of results, made from the files in benchmarks/: what was measured, when, on which machine, by which command.

python -m retrograde.bench.results benchmarks docs/results.md
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from .._base.report import beside, counted, size

PROG = "python -m retrograde.bench.results"
MOST = 40  # rows that a reader looks through
INTRO = f"""# Results and their dates

Measurements are kept as files in `benchmarks/` of the repository. Each names its machine, its date and its command. This page is
made from them, newest first, by `{PROG} benchmarks docs/results.md`.

Times are medians with quartiles in brackets, of a training step (forward and backward) where nothing else is said. *Activations*
are the peak of a step over what was there before it. Compare figures within a table: other tables are other moments or settings.
"""
TITLES = {
    "seconds": "ms (quartiles)",
    "first_seconds": "first step, s",
    "activation_bytes": "activations",
    "peak_bytes": "whole peak",
    "gradient_error": "gradient error",
    "to_checkpoint": "times checkpoint's",
    "pinned_bytes": "pinned",
    "predicted_pinned_bytes": "predicted",
    "layer_forward_ms": "forward of a layer, ms",
    "layer_copy_ms": "copying what it keeps, ms",
}
SHOWN = {"drift": "drift.md", "training": "drift.md#does-it-change-what-a-net-learns"}  # pages with a table of a long file
LEFT_OUT = ("variants", "timeout", "seed", "depths", "rounds", "profile")  # of settings: rows or the command have them


def page(files: Iterable[Path]) -> str:
    """The page, in markdown."""
    newest = sorted(sorted(files), key=lambda path: path.name[:10], reverse=True)
    return "\n".join([INTRO, *(_section(path) for path in newest)])


def _section(path: Path) -> str:
    found = json.loads(path.read_text(encoding="utf-8"))
    m = found["machine"]
    where = f"{m['device']}, torch {m['torch']}, Python {m['python']}, {found['date']}."
    setting = ", ".join(f"{name} {_said(name, value)}" for name, value in found.get("setting", {}).items() if _worth(name, value))
    lines = [f"## {path.stem}", "", f"{where} {setting[:1].upper()}{setting[1:]}.", "", "```", found["command"], "```", ""]
    for rows in _tables(found):
        if readable(rows):
            lines += [*_table(rows), ""]
        else:
            elsewhere = SHOWN.get(path.stem[11:].partition("-")[0])
            lines += [f"{counted(len(rows), 'row')}, in the file{f'; [a table of them]({elsewhere})' if elsewhere else ''}.", ""]
    return "\n".join(lines)


def _worth(name: str, value: Any) -> bool:
    return value is not None and name not in LEFT_OUT and not isinstance(value, dict)


def _said(name: str, value: Any) -> str:
    return (" × " if name == "shape" else " and ").join(map(str, value)) if isinstance(value, list) else str(value)


def _tables(found: dict[str, Any]) -> Iterable[list[dict[str, Any]]]:
    """What can be shown: lists of rows, and timings by name."""
    for name, value in found.items():
        if name == "rows":
            yield [_with_kernels(row) for row in value]
        elif isinstance(value, dict) and value and all(_timing(v) for v in value.values()):
            yield [{name: key, "seconds": timing} for key, timing in value.items()]


def _with_kernels(row: dict[str, Any]) -> dict[str, Any]:
    """A profile as columns of its own."""
    kernels = row.get("kernels") or {}
    rest = {name: value for name, value in row.items() if name != "kernels"}
    return rest | {f"{kind}, ms": f"{seconds * 1e3:.1f}" for kind, seconds in kernels.items()}


def readable(rows: Sequence[dict[str, Any]]) -> bool:
    """Whether these rows make a table that somebody would read."""
    values = [value for row in rows for value in row.values()]
    return len(rows) <= MOST and not any(isinstance(value, (list, dict)) and not _timing(value) for value in values)


def _table(rows: Sequence[dict[str, Any]]) -> list[str]:
    columns = list(
        dict.fromkeys(
            name for row in rows for name in row if row[name] is not None and name not in ("detail", "reference", "traceback")
        )
    )
    cells = [[_cell(name, row.get(name)) for name in columns] for row in rows]
    titles = [TITLES.get(name, name.replace("_", " ")) for name in columns]
    return [_line(titles), "|---" * len(columns) + "|", *map(_line, cells)]


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _timing(value: Any) -> bool:
    return isinstance(value, dict) and value.keys() == {"median", "low", "high"}


def _cell(name: str, value: Any) -> str:
    if value is None:
        return "–"
    if _timing(value):
        digits = 1 if value["median"] > 2e-3 else 3
        median, low, high = (f"{value[key] * 1e3:.{digits}f}" for key in ("median", "low", "high"))
        return f"{median} ({low}–{high})"
    if name.endswith("_bytes"):
        return size(value)
    if isinstance(value, float):
        if value >= 1000:
            return f"{value:,.0f}"
        return (
            f"{value:.1f}"
            if name.endswith("seconds")
            else f"{value:.3f}"
            if name.endswith(("bits", "to_checkpoint"))
            else f"{value:.2g}"
        )
    return str(value)


def main(argv: Sequence[str] | None = None) -> int:
    given = list(sys.argv[1:] if argv is None else argv)
    files = sorted(Path(given[0]).glob("*.json")) if len(given) == 2 else []
    if not files:
        print(f"{PROG} FOLDER PAGE: a folder with results as JSON, and the page to write", file=sys.stderr)
        return 2
    with beside(Path(given[1])) as part:
        part.write_text(page(files), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
