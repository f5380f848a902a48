"""Update, the one building block; Program, a checked list of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

from torch import Tensor, nn

from ._base.pytrees import flatten
from ._base.tracing import key_of
from .errors import ProgramError, at
from .rules import Add, Inverted, Rule

__all__ = ["ALL", "Program", "Update"]


class _All:
    def __repr__(self) -> str:
        return "rg.ALL"

    def __reduce__(self) -> str:
        return "ALL"  # stays the one object through copies and pickles


ALL = _All()
"""`takes=rg.ALL`: fn gets every side input."""


@dataclass(frozen=True, eq=False, repr=False)
class Update:
    """`target += fn(*sources, **side_inputs)`; the target is not a source.

    - `target`: the name of the stream that changes.
    - `fn`: a module or any other callable. It returns what the rule can apply, for `Add()` a tensor of the target's shape.
    - `sources`: the names of the streams that fn reads; one name or several.
    - `takes`: the side inputs that fn gets: names, or {fn's keyword: name of the side input}, or `rg.ALL`.
    - `rule`: how the output of fn is applied, `Add()` by default.

    >>> import torch, retrograde as rg
    >>> rg.Update("a", torch.nn.Tanh(), "b")
    a += Tanh(b)
    """

    target: str
    fn: Callable[..., Any]
    sources: Any  # one name or several; kept as a tuple
    takes: Any = ()
    rule: Rule = field(default_factory=Add)

    def __post_init__(self) -> None:
        sources = (self.sources,) if isinstance(self.sources, str) else self.sources
        names = (self.target, *sources) if isinstance(sources, (tuple, list)) else (self.target, sources)
        if not all(isinstance(name, str) for name in names):
            raise ProgramError(
                f"rg.Update(target, fn, sources) needs names of streams for target and sources, got {_short(self.target)} and "
                f"{_short(self.sources)}"
            )
        sources = tuple(sources)
        object.__setattr__(self, "sources", sources)
        if not isinstance(self.rule, Rule):
            raise ProgramError(f"{self.target}: rule must be an instance of rg.Rule like rg.Add(), got {_short(self.rule)}")
        if not callable(self.fn) or isinstance(self.fn, type):
            what = (
                f"the class {self.fn.__name__}, not an instance"
                if isinstance(self.fn, type)
                else f"{_short(self.fn)}, not callable"
            )
            raise ProgramError(f"{self}: fn is {what}")
        if not sources and not self.rule.alone:
            raise ProgramError(f"{self}: no sources. Name the streams that fn reads")
        if self.target in sources:
            raise ProgramError(
                f"{self}: the target {self.target!r} is among the sources, so the update cannot be undone. "
                "Read another stream, or split this one in two"
            )
        object.__setattr__(self, "takes", self.takes if self.takes is ALL else self._by_keyword())

    def _by_keyword(self) -> dict[str, str]:
        """The names of the side inputs that fn gets, by the keywords under which it gets them."""
        takes: Any = [self.takes] if isinstance(self.takes, str) or not isinstance(self.takes, Iterable) else self.takes
        pairs = [*takes.items()] if isinstance(takes, Mapping) else [(name, name) for name in takes]
        for _, name in pairs:
            if not isinstance(name, str):
                way_out = "Give what this one function takes: names, {its keyword: name} or rg.ALL"
                raise ProgramError(f"{self}: takes holds {_short(name)} instead of the name of a side input. {way_out}")
        return dict(pairs)

    def __repr__(self) -> str:
        name = getattr(self.fn, "__name__", type(self.fn).__name__)
        return f"{self.target} {self.rule.symbol} {name}({', '.join(self.sources)})"

    def side_inputs(self, side: Mapping[str, Any]) -> Mapping[str, Any]:
        """fn's keyword arguments."""
        return side if self.takes is ALL else {keyword: side[name] for keyword, name in self.takes.items()}

    def inverse(self) -> Update:
        rule = self.rule.rule if isinstance(self.rule, Inverted) else Inverted(self.rule)
        return replace(self, rule=rule)


def _short(value: object) -> str:
    return repr(value) if isinstance(value, (str, int, float, type(None), type)) else f"a {type(value).__name__}"


class Program:
    """A list of updates, checked once: what `run` makes of a plain list, and what modules keep.

    `blocks` is the number of updates in each block; if it is not given, a block is a run of updates that change no stream twice.
    `copies`: whether small masks and ids among the side inputs are copied, so that the caller may edit them afterwards.
    """

    def __init__(self, updates: Iterable[Update], blocks: tuple[int, ...] | None = None, copies: bool = True):
        if isinstance(updates, (Update, nn.Module)):
            way_out = "Put it into a list" if isinstance(updates, Update) else "Call the module itself, or its inverse"
            raise ProgramError(f"a list of updates is needed, got {_short(updates)}. {way_out}")
        self.updates, self.copies = tuple(updates), copies
        for index, update in enumerate(self.updates):
            if not isinstance(update, Update):
                raise ProgramError(f"update {index} is {_short(update)}, not an rg.Update")
        if not self.updates:
            raise ProgramError("no updates: a reversible program needs at least one")
        self.names = {name for update in self.updates for name in (update.target, *update.sources)}
        self.taken = {name for update in self.updates if update.takes is not ALL for name in update.takes.values()}
        self.takes_all = any(update.takes is ALL for update in self.updates)
        self.changing = {update.target for update in self.updates}
        self.one_way = next((at(i, u) for i, u in enumerate(self.updates) if not u.rule.can_undo), None)
        self.components = self._components()
        self.blocks = self._blocks() if blocks is None else blocks
        self.key = key_of(self)
        self.back: Program | None = None  # the inverse, once it was asked for
        self.notes: dict[str, Any] = {}  # what the engine has found out about these updates

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ = state | {"key": key_of(self), "back": None, "notes": {}}  # a copy is another program

    def _blocks(self) -> tuple[int, ...]:
        starts, changed = [0], set()
        for index, update in enumerate(self.updates):
            if update.target in changed:
                starts.append(index)
                changed = set()
            changed.add(update.target)
        return tuple(b - a for a, b in pairwise([*starts, len(self.updates)]))

    def _components(self) -> list[str]:
        """For each update a name that it shares with just those updates whose streams are connected with its own."""
        parent = {name: name for name in self.names}

        def root(name: str) -> str:
            while parent[name] != name:
                name = parent[name]
            return name

        for update in self.updates:  # a stream that never changes connects nothing
            for source in self.changing.intersection(update.sources):
                parent[root(source)] = root(update.target)
        return [root(update.target) for update in self.updates]

    def check(self, streams: Mapping[str, Any], side: Mapping[str, Any]) -> None:
        if not isinstance(streams, Mapping):
            raise ProgramError(f"streams must be a dict of tensors (or trees of tensors) by name, got {type(streams).__name__}")
        for name in self.names & streams.keys():
            for t in flatten(streams[name])[0]:
                if not isinstance(t, Tensor):
                    raise ProgramError(f"the stream {name!r} holds {_short(t)} instead of a tensor")
        if not self.names <= streams.keys():
            for index, update in enumerate(self.updates):
                for name in (update.target, *update.sources):
                    if name not in streams:
                        way_out = f"Streams given: {', '.join(streams) or 'none'}"
                        raise ProgramError(f"unknown stream {name!r}. {way_out}", at(index, update))
        if not self.taken <= side.keys():
            for index, update in enumerate(self.updates):
                for name in () if update.takes is ALL else update.takes.values():
                    if name not in side:
                        way_out = f"Pass it (None is allowed). Side inputs given: {', '.join(side) or 'none'}"
                        raise ProgramError(f"unknown side input {name!r}. {way_out}", at(index, update))

    def refuse_unused(self, side: Mapping[str, Any]) -> None:
        """A side input that no fn takes is most likely a typing error."""
        unused = () if self.takes_all else side.keys() - self.taken
        if unused:
            taken = ", ".join(sorted(self.taken)) or "none"
            raise ProgramError(
                f"no update takes the side input {', '.join(sorted(map(repr, unused)))}; taken: {taken}. Correct the name, or "
                "add it to `takes` of an update"
            )

    def inverse(self) -> Program:
        if self.back is None:
            self.back = Program((update.inverse() for update in reversed(self.updates)), self.blocks[::-1], self.copies)
        return self.back
