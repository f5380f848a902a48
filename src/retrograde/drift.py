"""How far the second run of each fn is from its first: passes over a net that are watched, and that leave nothing changed."""

from __future__ import annotations

import contextlib
import functools
import math
import pickle
import random
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from . import call as calls
from .errors import ProgramError, RetrogradeError, at
from .held import _STANDARD, Held
from .modules import Net, Reversible
from .replay import Draws, generators, replaying
from .streams import tensors
from .update import Update

_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}


@dataclass
class Twice:
    """The second run of a fn beside its first."""

    index: int
    update: Update
    absolute: float  # how far its sources are apart …
    relative: float
    output: float  # … and its output: 0 if it is the same to the bit
    drifted: bool  # the sources are further apart than the tolerance …
    parted: bool  # … or the output is
    rounding: float  # how far rounding in another order may take an output
    drawn: list[str]  # random generators outside of torch that the second run drew from
    changed: list[str]  # plain state that the first run changed
    program: str = ""  # name in the net

    @property
    def where(self) -> str:
        return at(self.index, self.update)


class Pass:
    """One forward and backward pass: what every fn was given and returned in its first run, compared with its second run."""

    def __init__(self, plain: Plain):
        self.plain = plain
        self.gradients: dict[str, Tensor] = {}
        self.error: RetrogradeError | None = None
        self.updates: list[tuple[int, Update]] = []  # in the order of their first runs
        self.twice: list[Twice] = []  # in the order of backward
        self.states = python_states()
        self._firsts: dict[Any, list[tuple[list[Tensor], list[Tensor], list[str]]]] = {}

    def need(self) -> dict[str, Tensor]:
        """The gradients."""
        if self.error is not None:
            raise self.error
        return self.gradients

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        calls.observer = self
        try:
            yield
        finally:
            calls.observer = None
            self._firsts.clear()

    def __call__(self, index: int, update: Update, sources: list[Any], out: Any) -> None:
        then, self.states = self.states, python_states()
        changed = self.plain.changed_by(update.fn)
        seen, gave = ([t.detach().clone() for t in tensors(value)] for value in (sources, out))
        firsts = self._firsts.setdefault((index, id(update)), [])
        if not replaying():
            self.updates.append((index, update))
            firsts.append((seen, gave, changed))
        elif firsts:
            drawn = [name for name, state in self.states.items() if then.get(name, state) != state]
            self.twice.append(_compared(index, update, (seen, gave, drawn), firsts.pop()))


def _compared(index: int, update: Update, second: Any, first: Any) -> Twice:
    (seen, gave, drawn), (then_seen, then_gave, changed) = second, first
    far = max(map(relative, seen, then_seen), default=0.0)
    absolute = max(map(_largest, seen, then_seen), default=0.0) if far else 0.0
    same = [(t.shape, t.dtype) for t in gave] == [(t.shape, t.dtype) for t in then_gave]
    output = max(map(relative, gave, then_gave), default=0.0) if same else math.inf
    drifted = far > tolerance(*seen)
    parted = drifted or output > 10 * tolerance(*gave)
    return Twice(index, update, absolute, far, output, drifted, parted, _rounding(*gave), drawn, changed)


class Trial:
    """A net and what it is given, for passes under one memory policy or another."""

    def __init__(self, net: nn.Module, inputs: Any, side: dict[str, Any]):
        if not isinstance(net, nn.Module):
            raise ProgramError(f"a module is needed, got a {type(net).__name__}. Put a list of updates into rg.Reversible")
        self.named: dict[str, Any] = {name: m for name, m in net.named_modules() if isinstance(m, Net)}
        if not self.named:
            raise ProgramError(f"{type(net).__name__} contains no rg.Reversible and no rg.ReversibleSequence")
        self.net, self.given, self.programs = net, (inputs, side), list(self.named.values())
        fns = [fn for program in self.programs for fn in _fns(program)]
        self.modules = list(dict.fromkeys([*net.modules(), *(m for fn in fns for m in Held(fn).modules)]))
        self.generators = [g for thing in (net, *fns) for g in Held(thing).generators]
        self.plain = Plain([])
        self._initialise()
        self.plain = Plain(fns)

    def run(self, memory: Any = None) -> Pass:
        """A pass under the policy, or under the net's own; an error of this library is kept in it."""
        made = Pass(self.plain)
        with self.unchanged(), made.watching():
            for program in () if memory is None else self.programs:
                program.memory = memory
            try:
                made.gradients = self._gradients(made)
            except RetrogradeError as error:
                made.error = error
        names = {id(u): name for name, m in self.named.items() if hasattr(m, "_program") for u in m._program.updates}
        for seen in made.twice:
            seen.program = names.get(id(seen.update), "")
        return made

    @contextlib.contextmanager
    def unchanged(self) -> Iterator[list[Any]]:
        """Buffers, random states, policies and plain attributes of fns are afterwards as they were."""
        draws = Draws(generators(tree_leaves(self.given)) + self.generators)
        states = python_states()
        policies = [program.memory for program in self.programs]
        buffers = [one for m in self.modules for one in _buffers(m)]
        try:
            yield buffers
        finally:
            draws.put_back()
            _put_back_python(states)
            with torch.no_grad():
                for slots, name, buffer, copy in buffers:
                    slots[name] = buffer if buffer is None else buffer.copy_(copy)
            for program, policy in zip(self.programs, policies, strict=True):
                program.memory = policy
            self.plain.put_back()

    def _initialise(self) -> None:
        """Run the net once if some modules are lazy: a pass would find other modules afterwards than before."""
        slots = [(m, t) for m in self.modules for t in (*m._parameters.values(), *m._buffers.values())]
        lazy = dict.fromkeys(m for m, t in slots if t is not None and is_lazy(t))
        if not lazy:
            return
        with self.unchanged() as buffers, contextlib.ExitStack() as stack, torch.no_grad():
            for module in lazy:  # this hook comes after the module's own, which makes its buffers
                hook = module.register_forward_pre_hook(lambda m, _: buffers.extend(_buffers(m)))
                stack.callback(hook.remove)
            args, kwargs = tree_map(_fresh, self.given)
            self.net(*args, **kwargs)

    def _gradients(self, made: Pass) -> dict[str, Tensor]:
        """All gradients of net under fixed random cotangents, by name."""
        flat, spec = tree_flatten(tree_map(_fresh, self.given))
        wanted = {name: p for name, p in self.net.named_parameters() if p.requires_grad}
        wanted |= {f"input {i}": t for i, t in enumerate(flat) if isinstance(t, Tensor) and t.requires_grad}
        args, kwargs = tree_unflatten(flat, spec)
        with torch.enable_grad():
            outs = [t for t in tree_leaves(self.net(*args, **kwargs)) if isinstance(t, Tensor) and t.requires_grad]
        generator = torch.Generator().manual_seed(0)
        cotangents = [torch.randn(t.shape, generator=generator, dtype=torch.float64).to(t) for t in outs]
        made.states = python_states()  # what ran after the last fn may have drawn
        with contextlib.ExitStack() as stack:
            for device in {t.device.type for t in outs}:  # backward belongs outside of autocast
                stack.enter_context(torch.autocast(device, enabled=False))
            found = torch.autograd.grad(outs, list(wanted.values()), cotangents, allow_unused=True)
        return {name: torch.zeros_like(p) if g is None else g for (name, p), g in zip(wanted.items(), found, strict=True)}


def _fns(program: Any) -> list[Any]:
    if isinstance(program, Reversible):
        return [update.fn for update in program.program.updates]
    if hasattr(program, "functions"):
        return program.functions()
    return [getattr(block, name) for block in program.blocks for name in "fgjk" if hasattr(block, name)]


def _buffers(module: nn.Module) -> list[tuple[dict[str, Any], str, Any, Any]]:
    """Of each buffer its slot, itself and a copy."""
    made = [(name, b) for name, b in module._buffers.items() if b is None or not is_lazy(b)]
    return [(module._buffers, name, b, None if b is None else b.detach().clone()) for name, b in made]


def _fresh(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return value.detach().clone().requires_grad_(value.is_floating_point() or value.is_complex())


# -- how far apart -----------------------------------------------------------------------------------------------------


def relative(a: Tensor, b: Tensor, least: float = 0.0) -> float:
    """The error of `a` against the size of `b`, or against `least` where that is more; NaN equals NaN here."""
    if bool(((a == b) | ((a != a) & (b != b))).all()):
        return 0.0
    far, scale = norm(_wide(a) - _wide(b)), max(norm(b), least)
    return math.inf if math.isnan(far) else far / scale if scale else far


def vector_error(mine: dict[str, Tensor], true: dict[str, Tensor]) -> float:
    """The relative error of all tensors in `mine` as one vector."""
    scale = norm(*(true[name] for name in mine))
    far = norm(*(_wide(mine[name]) - _wide(true[name]) for name in mine))
    return far / scale if scale else far


def norm(*given: Tensor) -> float:
    return sum(float(_wide(t).abs().square().sum()) for t in given) ** 0.5


def tolerance(*given: Tensor) -> float:
    return max((_TOLERANCE.get(t.dtype, 5e-3) for t in given), default=0.0)


def _largest(a: Tensor, b: Tensor) -> float:
    return float((_wide(a) - _wide(b)).abs().max()) if a.numel() else 0.0


def _rounding(*given: Tensor) -> float:
    floats = [t.dtype for t in given if t.is_floating_point() or t.is_complex()]
    return max((max(1e-5, 4 * torch.finfo(dtype).eps) for dtype in floats), default=0.0)


def _wide(t: Tensor) -> Tensor:
    return t.to(torch.complex128 if t.is_complex() else torch.float64)


# -- state outside of torch --------------------------------------------------------------------------------------------


def python_states() -> dict[str, Any]:
    """The states of Python's and numpy's global generators, as something that can be compared."""
    states: dict[str, Any] = {"Python's random": random.getstate()}
    if "numpy.random" in sys.modules:
        states["numpy's global generator"] = pickle.dumps(sys.modules["numpy.random"].get_state(legacy=False))
    return states


def _put_back_python(states: dict[str, Any]) -> None:
    random.setstate(states["Python's random"])
    if "numpy's global generator" in states:
        sys.modules["numpy.random"].set_state(pickle.loads(states["numpy's global generator"]))


class Plain:
    """What fns keep in plain Python: attributes of their modules, or variables of their closures."""

    def __init__(self, fns: list[Any]):
        self.fns = fns
        owners = {key: own for fn in fns for key, kind, own in _owners(fn) if kind == "attribute"}
        self.copies = [(own, _without_standard(own)) for own in owners.values()]
        values = [value for _, copy in self.copies for value in copy.values()]
        self.contents = [(value, value.copy()) for value in values if type(value) in (list, dict, set)]
        self.drawing = [(value, value.getstate()) for value in values if isinstance(value, random.Random)]
        self.look()

    def look(self) -> None:
        self.marks = {key: _marks(own) for fn in self.fns for key, _, own in _owners(fn)}

    def changed_by(self, fn: Any) -> list[str]:
        """What is another than at the last look."""
        changed = []
        for key, kind, own in _owners(fn):
            now = _marks(own)
            then, self.marks[key] = self.marks.get(key, now), now
            changed += [f"{kind} {name!r}" for name in now if name not in then or then[name] != now[name]]
        return changed

    def put_back(self) -> None:
        for own, copy in self.copies:
            for name in _without_standard(own).keys() - copy.keys():
                del own[name]
            own.update(copy)
        for value, content in self.contents:
            value.clear()
            (value.extend if isinstance(value, list) else value.update)(content)
        for value, state in self.drawing:
            value.setstate(state)
        self.look()


def _owners(fn: Any) -> Iterator[tuple[int, str, dict[str, Any]]]:
    """Where fn may keep something. Torch's own modules keep nothing but in buffers."""
    for module in Held(fn).modules:
        if not type(module).__module__.startswith("torch.") and not isinstance(module, Net):
            yield id(module), "attribute", module.__dict__
    while isinstance(fn, functools.partial):
        fn = fn.func
    fn = getattr(fn, "__self__", fn)
    if isinstance(fn, types.FunctionType):
        cells = zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True)
        yield id(fn), "variable", {name: cell.cell_contents for name, cell in cells if cell != types.CellType()}
    elif not isinstance(fn, nn.Module) and hasattr(fn, "__dict__"):
        yield id(fn), "attribute", fn.__dict__


def _without_standard(own: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in own.items() if name not in _STANDARD}


def _marks(own: dict[str, Any]) -> dict[str, Any]:
    """Of each value something that tells whether it is another one later."""
    return {name: _mark(value) for name, value in _without_standard(own).items()}


def _mark(value: Any) -> Any:
    if isinstance(value, (int, float, complex, str, bytes, type(None))):
        return repr(value)
    if isinstance(value, random.Random):
        return value.getstate()
    return (id(value), len(value)) if isinstance(value, (list, dict, set)) else id(value)
