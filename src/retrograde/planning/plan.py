"""A plan: what each way to train takes, how far it goes, and whether reversal is worth it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import date
from typing import Any

import torch

from .._base.report import counted, size
from ..errors import BudgetTooSmall
from .predict import Planner, Predicted, ways_of
from .reach import deepest, longest, widest
from .subject import sizes_told, takes
from .verdict import verdict

REACHES = {"depth": deepest, "seq": longest, "batch": widest}


@dataclass
class Row:
    """One way. `failed` says why there is no prediction."""

    way: str
    predicted: Predicted | None
    failed: str | None = None
    fits: bool | None = None  # into the memory that is given
    reach: dict[str, int] | None = None  # the deepest, longest and largest that fits, the other sizes as they are

    def as_dict(self) -> dict[str, Any]:
        found = None if self.predicted is None else {**asdict(self.predicted), "peak": self.predicted.peak}
        return {"way": self.way, "failed": self.failed, "fits": self.fits, "reach": self.reach, "bytes": found}


@dataclass
class Plan:
    setting: dict[str, Any]
    rows: list[Row]
    worth: bool
    verdict: str

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        rows = [row.as_dict() for row in self.rows]
        about = {"date": date.today().isoformat(), "torch": torch.__version__, "setting": self.setting}
        return {**about, "rows": rows, "reversal_is_worth_it": self.worth, "verdict": self.verdict}

    def what(self) -> str:
        """The sizes, in a line."""
        s = self.setting
        net = s["model"] or s["block"] or f"width {s['dim']}, {counted(s['heads'], 'head')}"
        precision = s["dtype"] if s["autocast"] == "none" else f"{s['dtype']} with {s['autocast']} autocast"
        each = f" on each of {s['devices']} devices" if s["devices"] > 1 else ""
        sizes = sizes_told(s, s["seq"], s["batch"])
        return f"{net}{', ' if sizes else ''}{sizes}{each}, {precision}"

    def held(self) -> str:
        """What all ways share, in a line."""
        first = next(row.predicted for row in self.rows if row.predicted is not None)
        s = self.setting
        grads = {"none": "start as None", "kept": "kept", "stepped": "stepped in backward"}[s["grads"]]
        line = f"parameters {size(first.parameters)}, gradients {size(first.gradients)} ({grads}), "
        line += f"{s['optimizer']} {size(first.states)}"
        return f"{line}, whole for a moment {size(first.gathered)}; per device" if first.gathered else line


def make_plan(planner: Planner, did: Callable[[str], object] = lambda way: None) -> Plan:
    """All ways; `did` hears of each."""
    setting = planner.setting
    sizes = setting["depth"], setting["seq"], setting["batch"]
    rows: list[Row] = []
    for way in ways_of(setting):
        try:
            found = planner.at(way, sizes)
        except BudgetTooSmall as error:
            rows.append(Row(way, None, str(error), fits=False if setting["room"] else None))
        else:
            rows.append(Row(way, found, fits=found.peak <= setting["room"] if setting["room"] else None))
        if setting["room"]:
            rows[-1].reach = {name: reach(planner, way, sizes) for name, reach in REACHES.items() if takes(setting, name)}
        did(way)
    worth, words = verdict(setting, {row.way: row.predicted for row in rows if row.predicted is not None})
    return Plan(setting, rows, worth, words)
