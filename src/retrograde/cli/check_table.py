"""The verdict of `retrograde check`: questions and answers, then each fault with the line to change."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from rich.markup import escape
from rich.table import Table

from .._base.report import counted
from ..check.findings import Finding
from ..check.gradients import Report, short
from .screen import console

QUESTIONS = {  # and the kinds of findings that say no
    "repeats exactly": ("non-deterministic", "stateful"),  # what is kept is a fault where it changes what fn returns
    "keeps no state": ("stateful",),
    "leaves its inputs alone": ("editing",),
    "streams come back": ("drifting", "wrong rule"),
    "gradients agree": ("wrong backward", "refused"),
}
STOPPED = "not checked: an earlier fault stopped the run"
COLORS = {"ok": "green", "FAULT": "bold red", "warning": "yellow", "–": "dim"}


@dataclass
class Checked:
    """What was checked, and what came of it."""

    machine: dict[str, Any]
    date: str
    command: str
    setting: dict[str, Any]
    sound: bool
    answers: dict[str, dict[str, str]]  # by question: "ok", "FAULT", "warning" or "–", and why
    faults: list[dict[str, Any]]
    warnings: list[dict[str, Any]]
    notes: list[str]
    gradient_error: float | None
    recovered: float | None  # the largest relative error of the recovered streams


def judge(report: Report, notes: list[str]) -> dict[str, Any]:
    """Faults are what spoils gradients, here or under another policy; noise and drift that does no harm are warnings."""
    mild = [f for f in report.findings if f.harmless or (f.kind == "drifting" and report.ok)]
    faults = grouped([f for f in report.findings if f not in mild])
    if not report.ok and not faults:
        where = report.first or "the net"
        faults = grouped([Finding(where, "refused", report.cause or "gradients differ")])
    reached = report.ok or bool(report.errors)
    return {
        "sound": not faults,
        "answers": {question: answer(question, report, faults, mild, reached) for question in QUESTIONS},
        "faults": faults,
        "warnings": grouped(mild),
        "notes": alike(notes),
        "gradient_error": report.gradient_error if reached else None,
        "recovered": report.recovered if reached else None,
    }


def answer(question: str, report: Report, faults: list[dict[str, Any]], mild: list[Finding], reached: bool) -> dict[str, str]:
    kinds = QUESTIONS[question]
    count = sum(len(fault["updates"]) for fault in faults if fault["kind"] in kinds)
    verdict = "FAULT" if count else "warning" if any(f.kind in kinds for f in mild) else "ok"
    times = f"{counted(count, 'function')}: see below"
    if question == "gradients agree":
        if not reached:
            return {
                "verdict": "FAULT" if count else "–",
                "why": times if count else STOPPED,
            }
        why = f"relative error {short(report.gradient_error)} against ordinary autograd, the largest of one {short(report.worst)}"
        return {"verdict": "ok" if report.ok else "FAULT", "why": why}
    if question == "streams come back":
        if not reached and not count:
            return {"verdict": "–", "why": STOPPED}
        if faults and not count and report.recovered:
            return {"verdict": "–", "why": f"relative error {short(report.recovered)} below the fault"}
        where = f", at {report.furthest}" if report.furthest else ""
        error = f"relative error {short(report.recovered)}{where}"
        exact = "to the bit" if reached and not report.recovered else error
        return {"verdict": verdict, "why": exact if reached else times}
    if count:
        return {"verdict": verdict, "why": times}
    steps = f", in {report.steps} steps on different batches" if report.steps > 1 else ""
    fine = {
        "repeats exactly": f"{counted(report.replayed, 'function')} recomputed on the same input, with the same bits",
        "keeps no state": f"nothing that functions keep changes what they return{steps}",
        "leaves its inputs alone": "no function edits its sources or its side inputs",
    }
    if not reached:
        return {"verdict": "–", "why": STOPPED}
    return {"verdict": verdict, "why": fine[question]}


def grouped(findings: list[Finding]) -> list[dict[str, Any]]:
    """What is the same thing in several blocks, once."""
    groups: dict[Any, list[Finding]] = {}
    for f in findings:
        same = f.line or f.where, f.kind
        groups.setdefault(same, []).append(f)
    return [{**asdict(group[0]), "instead": group[0].instead, "updates": [_where(f) for f in group]} for group in groups.values()]


def alike(notes: list[str]) -> list[str]:
    """Each note once, whatever update it is about."""
    groups: dict[str, list[str]] = {}
    for note in notes:
        groups.setdefault(re.sub(r"update \d+: ", "", note), []).append(note)
    return [group[0] + (f" (and {len(group) - 1} more like it)" if len(group) > 1 else "") for group in groups.values()]


def _where(f: Finding) -> str:
    return f"{f.program}, {f.where}" if f.program else f.where


def show(found: Checked, drawn: str | None) -> None:
    out = console()
    for line in lines(found):
        out.print(line, soft_wrap=isinstance(line, str))
    if drawn:
        out.print(escape(drawn), soft_wrap=True)


def lines(found: Checked) -> Iterator[Any]:
    s, machine = found.setting, found.machine
    precision = "" if s["autocast"] == "none" else f" under {s['autocast']} autocast"
    yield f"[bold]{escape(s['net'])}[/bold]: {escape(s['what'])}{precision}, memory {s['memory']}, arithmetic {s['arithmetic']}"
    yield escape(f"{machine['device']}, torch {machine['torch']}, {found.date}")
    yield ""
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0), pad_edge=False)
    for question, said in found.answers.items():
        color = COLORS[said["verdict"]]
        table.add_row(f"[{color}]{said['verdict']}[/{color}]", question, escape(said["why"]))
    yield table
    yield ""
    for title, color, items in (("fault", "bold red", found.faults), ("warning", "yellow", found.warnings)):
        for number, fault in enumerate(items, 1):
            more = f", and {len(fault['updates']) - 1} more like it" if len(fault["updates"]) > 1 else ""
            yield f"[{color}]{title} {number}[/{color}]: {escape(fault['updates'][0])}{more}"
            if fault["line"]:
                yield f"  [cyan]{escape(fault['line'])}[/cyan]: {escape(fault['code'])}"
            yield f"  {fault['kind']}: {escape(fault['detail'])}"
            if fault["instead"]:
                yield f"  instead: {escape(fault['instead'])}"
    for note in found.notes:
        yield f"note: {escape(note)}"
    count = len(found.faults)
    yield "[green]sound[/green]" if found.sound else f"[bold red]{counted(count, 'fault')}[/bold red]"
