"""What a measurement found, and on which machine: kept as JSON, shown as a table."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

from .._base.report import as_json, beside, counted, machine, origin, save, size
from .measure import Timing

__all__ = ["Report", "Row", "as_json", "beside", "machine", "origin", "save", "size"]


@dataclass
class Row:
    depth: int
    policy: str
    activation_bytes: int  # the peak of a step over what was there before it; gradients too where they start as None
    peak_bytes: int  # the peak of everything: parameters, gradients, activations
    seconds: Timing


@dataclass
class Report:
    machine: dict[str, Any]
    date: str
    command: str
    setting: dict[str, Any]
    rows: list[Row]
    kind: ClassVar[type] = Row

    @classmethod
    def load(cls, path: Path) -> Self:
        """Raises OSError, or ValueError where the file holds something else."""
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            timed = [row["seconds"] and Timing(**row["seconds"]) for row in found["rows"]]
            rows = [cls.kind(**{**row, "seconds": seconds}) for row, seconds in zip(found.pop("rows"), timed, strict=True)]
            return cls(**found, rows=rows)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"{path} is not a report of this command ({type(error).__name__}: {error})") from error

    def where(self) -> str:
        """The machine and the date, in a line."""
        m = self.machine
        threads = "" if self.setting["device"] == "cuda" else f", {counted(m['threads'], 'thread')}"
        return f"{m['device']}{threads}, torch {m['torch']}, {self.date}"

    def what(self) -> str:
        """The sizes, in a line."""
        s = self.setting
        grads = "gradient buffers kept" if s["grads"] == "kept" else "gradients start as None"
        return (
            f"width {s['width']}, {counted(s['heads'], 'head')}, {s['batch']} × {s['length']} tokens, {s['precision']}, {grads}"
        )

    def table(self) -> str:
        over = "over the start" if self.setting["grads"] == "none" else "activations"
        lines = [f"{'depth':>5}  {'policy':<10} {over:>14} {'whole peak':>12} {'median':>10} {'quartiles':>20} {'to store':>9}"]
        stored = {row.depth: row.seconds.median for row in self.rows if row.policy == "store"}
        for row in self.rows:
            t = row.seconds
            ratio = f"{t.median / stored[row.depth]:.2f}" if row.depth in stored else "–"
            lines.append(
                f"{row.depth:>5}  {row.policy:<10} {size(row.activation_bytes):>14} {size(row.peak_bytes):>12} "
                f"{t.median * 1e3:>7.1f} ms {t.low * 1e3:>7.1f} to {t.high * 1e3:>6.1f} ms {ratio:>9}"
            )
        return "\n".join(lines)
