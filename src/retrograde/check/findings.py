"""What is the matter with the functions of a net, from passes over it that were watched; and the line to change."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..errors import Edited, EditedInBackward, NotRepeated, RetrogradeError
from ..update import Inverted, Update
from .lines import Line, definition, shown, text
from .passes import Pass, Place, Recomputed, tolerance

KINDS = {  # and what to write instead
    "non-deterministic": "let fn depend on its inputs alone, and draw from torch's generators, as torch.rand does",
    "stateful": "keep it in a buffer (register_buffer): a recomputation sees it as it was; or change it `if not rg.replaying()`",
    "editing": "let fn work on a copy: `x = x * 0.5` for `x *= 0.5`, `x.clamp(-1, 1)` for `x.clamp_(-1, 1)`",
    "wrong rule": "let undo(apply(target, out), out) be the target: undo must use `out` just as apply does",
    "wrong backward": "let the autograd.Function keep tensors in ctx.save_for_backward alone, and edit none of them",
    "drifting": "use arithmetic='exact' (for additions); or rg.Anchor(every=n), memory='checkpoint', a norm at the start of fn",
    "refused": "",
}
DRAWS = {  # what a finding says of a generator, and what to write instead
    "Python's random": "draw from torch's generators: torch.rand for random.random, torch.randint for random.randrange",
    "numpy's global generator": "draw from torch's generators: torch.rand for np.random.rand, torch.randn for np.random.randn",
    "(a random generator)": "draw from torch's generators, as torch.rand and torch.randn do: backward puts these back",
}
IN_PLACE = re.compile(r"[-+*/@%&|^<>]=(?!=)|\w_\(|\]\s*=[^=]|\.data\b|\bout=")  # lines that edit by what is written in them


@dataclass
class Finding:
    """What is the matter with the fn of an update. The kinds are in `KINDS`."""

    where: str
    kind: str
    detail: str
    program: str = ""  # the name in the net of the program that the update belongs to
    line: str = ""  # of the user's code, as file:number, where it can be known …
    code: str = ""  # … and what is written there
    harmless: bool = False  # of the size of rounding
    advice: str = ""  # what to write in place of it, where more is known than the kind

    @property
    def place(self) -> Place:
        return Place(self.program, self.where)

    @property
    def instead(self) -> str:
        """What to write in place of it."""
        return "" if self.harmless else self.advice or KINDS[self.kind]

    @property
    def cause(self) -> str:
        return f"{self.kind}: {self.detail}{'. Instead: ' if self.instead else ''}{self.instead}"

    def __str__(self) -> str:
        place = f" ({self.line})" if self.line else ""
        return f"{self.program + ', ' if self.program else ''}{self.where}{place}: {self.kind}: {self.detail}"

    def at_line(self, line: Line | None) -> Finding:
        return replace(self, line=shown(line), code=text(line))


def faults(made: Pass) -> list[Finding]:
    """The fns that edit what they are given or are recomputed as something else, and the rules that do not undo what they did."""
    found = [fault for t in made.recomputed if t.place not in made.edited and (fault := _fault(t))]
    for place, names in made.edited.items():
        what = f"it edits {' and '.join(f'its source {name!r}' for name in names)}, out of sight of autograd"
        found.append(_finding(place, "editing", what))
    for place, missed in made.undone.items():
        update = made.updates[place][1]
        if missed > 10 * tolerance(*_parameters(update)):
            rule = _rule(update)
            what = f"undo of its rule {type(rule).__name__} misses what apply was given by {missed:.1e} of its size"
            found.append(_finding(place, "wrong rule", what))
    if made.error is not None and made.error.where:
        found = _with_error(made, made.error, made.error.where, found)
    order = {t.place: i for i, t in enumerate(made.recomputed)}
    return sorted(found, key=lambda f: order.get(f.place, -1))


def _finding(place: Place, kind: str, detail: str, **more: Any) -> Finding:
    return Finding(place.where, kind, detail, place.program, **more)


def _with_error(made: Pass, error: RetrogradeError, where: str, found: list[Finding]) -> list[Finding]:
    """The findings with what the engine says."""
    last = made.recomputed[-1] if made.recomputed and made.recomputed[-1].place.where == where else None
    place = made.last if made.last is not None and made.last.where == where else Place("", where)
    message = str(error).removeprefix(f"{where}: ")
    if isinstance(error, NotRepeated):
        if last is not None and last.drawn:
            return found  # its generator is the cause, and found already
        changes = f" ({_changes(last)})" if last and last.changed else ""
        return [*(f for f in found if f.place != place), _finding(place, "stateful", message + changes)]
    if isinstance(error, Edited):
        message = message.partition(". Let fn")[0]  # what to do is said by the finding
    kinds: dict[type, str] = {Edited: "editing", EditedInBackward: "wrong backward"}
    line = _of_backward(made, place) if isinstance(error, EditedInBackward) else None
    return [*found, _finding(place, kinds.get(type(error), "refused"), message).at_line(line)]


def _of_backward(made: Pass, place: Place) -> Line | None:
    return next((definition(kind.backward) for kind in made.custom.get(place, ())), None)


def _fault(t: Recomputed) -> Finding | None:
    """What a fn does wrong, if it does."""
    other = f"when recomputed on the same sources, it returned something else, relative difference {t.output:.1e}"
    if t.drawn:
        what = f"it draws from {' and '.join(t.drawn)}, which backward does not repeat"
        why = "" if t.relative else f" ({other if t.output else 'this time its output was the same'})"
        return _finding(t.place, "non-deterministic", what + why)
    if t.relative or not t.output:
        return None
    if t.output <= t.rounding:
        also = f" ({_changes(t)})" if t.changed else ""
        noise = f"noise of {t.output:.0e}, as atomic additions make{also}"
        return _finding(t.place, "non-deterministic", noise, harmless=True)
    if t.changed:
        return _finding(t.place, "stateful", f"{_changes(t)}, and {other}")
    return _finding(t.place, "non-deterministic", f"random or stateful: {other}")


def _changes(t: Recomputed) -> str:
    return f"it changes its {' and its '.join(t.changed)}"


def drifting(own: Pass, known: list[Finding], share: float = 1.0) -> list[Finding]:
    """The first update with sources that are off by this share of the tolerance, unless a fn above it is at fault."""
    faulty = {f.place for f in known}
    editing = {f.place for f in known if f.kind == "editing"}  # what they are given is off by their own doing
    for t in own.recomputed:
        if t.drift > share and t.place not in editing:
            worst = max(own.recomputed, key=lambda one: one.relative)
            detail = (
                f"its sources were recovered with a relative error of {t.relative:.1e} (the largest is {worst.relative:.1e}, at "
                f"update {worst.index}): undoing the updates above it rounds"
            )
            return [_finding(t.place, "drifting", detail)]
        if t.place in faulty:
            break
    return []


def wrong_backward(own: Pass, where: str | None) -> Finding | None:
    """All fns were recomputed as they were, and the gradients differ from `where` on: a custom Function is at fault."""
    places = list(own.updates)
    first = next((i for i, place in enumerate(places) if place.where == where), 0)
    for place in places[first:]:  # from there up: the nearest one
        if place in own.custom:
            kinds = ", ".join(kind.__name__ for kind in own.custom[place])
            what = f"all fns were recomputed as they were, but gradients differ below its autograd.Function {kinds}"
            what += ". It may keep something elsewhere than in ctx.save_for_backward"
            return _finding(place, "wrong backward", what).at_line(_of_backward(own, place))
    return None


def with_lines(made: Pass, found: Iterable[Finding], again: Callable[..., Pass]) -> list[Finding]:
    """The findings with the lines to change, from one more pass that follows the faulty fns line by line."""
    found = list(found)
    wanted = {f.place for f in found if f.kind in ("non-deterministic", "stateful", "editing")}
    traced = again(traced=wanted) if wanted else None
    updates = {place: update for place, (_, update) in made.updates.items()}
    found = [f if f.line else f.at_line(_line(f, traced, updates.get(f.place))) for f in found]
    return [replace(f, advice=_advice(f, updates.get(f.place))) for f in found]


def _advice(f: Finding, update: Update | None) -> str:
    """What to write instead, where more is known than the kind of the finding."""
    if f.kind in ("non-deterministic", "stateful"):
        return next((instead for drawn, instead in DRAWS.items() if drawn in f.detail), "")
    if f.kind != "editing" or IN_PLACE.search(f.code):
        return ""
    if "inplace=True" in f.code:
        return "write inplace=False: fn must not edit its source"
    modules = update.fn.named_modules() if update is not None and isinstance(update.fn, torch.nn.Module) else ()
    editing = {f"{type(m).__name__} {name!r}".removesuffix(" ''") for name, m in modules if getattr(m, "inplace", None) is True}
    return f"write inplace=False for {', '.join(sorted(editing))}: fn must not edit its source" if editing else ""


def _line(f: Finding, made: Pass | None, update: Update | None) -> Line | None:
    if update is None:
        return None
    if f.kind == "wrong rule":
        return definition(type(_rule(update)).undo)
    if made is None or f.place not in made.traces:
        return definition(update.fn) if f.kind != "drifting" else None
    what = "edited" if f.kind == "editing" else "drawn" if "it draws from" in f.detail else "changed"
    return made.line(f.place, what) or definition(update.fn)


def _rule(update: Update) -> Any:
    return update.rule.rule if isinstance(update.rule, Inverted) else update.rule


def _parameters(update: Update) -> Sequence[Tensor]:
    """Tell the precision that fn computes in."""
    return [*update.fn.parameters()][:1] if isinstance(update.fn, torch.nn.Module) else []
