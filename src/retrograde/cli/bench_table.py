"""The rows of `retrograde bench` as a table, with ratios to ordinary training."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from rich import box
from rich.table import Table

from .._base.report import size
from ..bench.compare import Comparison, Found
from ..bench.variants import REFERENCE

COLUMNS = ("variant", "ms of a step (quartiles)", "ratio", "activations", "ratio", "whole peak", "gradient error", "first step")
FAR = 1e-2  # relative error of gradients


def table(rows: list[Found]) -> Table:
    """One section for each depth; ratios are to ordinary training."""
    shown = Table(box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False, header_style="bold")
    shown.add_column("depth", justify="right")
    for column in COLUMNS:
        shown.add_column(column, justify="left" if column == "variant" else "right", no_wrap=column == "variant")
    ordinary = {row.depth: row for row in rows if row.variant == REFERENCE and row.failed is None}
    for row, after in zip(rows, [*rows[1:], None], strict=True):
        last = after is not None and after.depth != row.depth
        shown.add_row(str(row.depth), row.variant, *cells(row, ordinary.get(row.depth)), end_section=last)
    return shown


def cells(row: Found, ordinary: Found | None) -> Iterator[str]:
    """The figures of a row; why there are none, where there are none."""
    if row.failed is not None or row.seconds is None:
        yield row.failed or ""
        return
    t = row.seconds
    yield f"{t.median * 1e3:.1f} ({t.low * 1e3:.1f}–{t.high * 1e3:.1f})"
    yield ratio(t.median, ordinary and ordinary.seconds and ordinary.seconds.median)
    yield size(row.activation_bytes or 0)
    yield ratio(row.activation_bytes, ordinary and ordinary.activation_bytes)
    yield size(row.peak_bytes or 0)
    yield "–" if row.gradient_error is None else "0" if row.gradient_error == 0 else f"{row.gradient_error:.0e}"
    yield f"{row.first_seconds or 0:.1f} s"


def kernels(rows: list[Found]) -> Table:
    """Milliseconds of a step by kind of work, and what is left of it: on a GPU, time in which it waits for the host."""
    shown = Table(
        box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False, header_style="bold", title="where the time goes, ms of a step"
    )
    kinds = next(list(row.kernels) for row in rows if row.kernels)
    for column in ("depth", "variant", *kinds, "waiting"):
        shown.add_column(column, justify="left" if column == "variant" else "right", no_wrap=column == "variant")
    for row in rows:
        if row.kernels and row.seconds:
            waiting = max(0.0, row.seconds.median - sum(row.kernels.values()))
            figures = (f"{seconds * 1e3:.1f}" for seconds in (*row.kernels.values(), waiting))
            shown.add_row(str(row.depth), row.variant, *figures)
    return shown


def ratio(value: float | None, to: float | None) -> str:
    return f"{value / to:.2f}" if value is not None and to else "–"


def notes(rows: Iterable[Found]) -> Iterator[str]:
    """What does not fit into a cell, each thing once for all depths where it is the same."""
    details: dict[tuple[str, str], list[int]] = {}
    for row in rows:
        if row.detail:
            details.setdefault((row.variant, row.detail), []).append(row.depth)
        if row.reference not in (None, REFERENCE):
            details.setdefault(("gradient error", f"against {row.reference}, as {REFERENCE} has none"), []).append(row.depth)
    for (variant, detail), depths in details.items():
        yield f"{variant}, depth {', '.join(map(str, dict.fromkeys(depths)))}: {detail}"


def doubts(report: Comparison) -> Iterator[str]:
    """A line, if reversal without compiling is further off than rounding in float32 takes it."""
    s = report.setting
    eager = {v["name"] for v in s["variants"] if v["way"] == "retrograde" and v["compiled"] == "no"}
    errors = {row.variant: row.gradient_error for row in report.rows if row.variant in eager and (row.gradient_error or 0) > FAR}
    if errors and s["block"] and s["dtype"] in ("float32", "float64"):
        name, error = max(errors.items(), key=lambda one: one[1])
        yield (
            f"{name}: a gradient error of {error:.0e} is more than rounding, a function may not repeat itself: "
            f"run `retrograde check {s['block']}`"
        )
