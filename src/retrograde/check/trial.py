"""Passes over a net under one memory policy or another, step after step on other batches, that leave nothing changed."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from .._base.function_modules import modules_of
from .._base.torch_private import tree_flatten, tree_leaves, tree_map, tree_unflatten
from .._engine.run import instead
from ..errors import NotRepeated, ProgramError, RetrogradeError
from .passes import Pass, Place
from .plain_state import Change, Plain, Snapshot, python_states, unmade


class Trial:
    """A net and what it is given, for passes under one memory policy or another.

    What runs in them is found by running the net: any module will do whose forward calls `rg.run` or a reversible net.
    """

    def __init__(self, net: nn.Module, inputs: Any, side: dict[str, Any]):
        if not isinstance(net, nn.Module):
            raise ProgramError(f"a module is needed, got a {type(net).__name__}. Put a list of updates into rg.Reversible")
        self.net, self.given, self.step = net, (inputs, side), 0
        self._look()
        self._initialise()
        self._after: Snapshot | None = None
        self._changed: dict[Place, list[Change]] = {}  # by any pass

    def _look(self) -> None:
        self.plain, self._found = Plain(), {id(self.net)}
        self.plain.places_of(self.net)
        self.first = self.now = Snapshot(self.given, modules_of(self.net), self.plain)

    def __enter__(self) -> Trial:
        return self

    def __exit__(self, *_: Any) -> None:
        self.first.put_back()

    def run(self, memory: Any = None, *, traced: Collection[Place] = (), counters: Iterable[Change] = ()) -> Pass:
        """A pass under the policy, or under the net's own; an error of this library is kept in it.

        Nothing is verified by the engine meanwhile. `counters`: set to these values between the forward pass and backward.
        """
        made = Pass(self.net, self.plain, self._finds, traced)
        try:
            with made.watching(), instead(memory, verify="off"):
                made.gradients = self._gradients(made, self._batch(), counters)
            if memory == "store":
                self._after = self._snapshot()
        except RetrogradeError as error:
            made.error = error
        except Exception as error:
            if not self.step:
                raise
            made.error = self._kept(made, memory, error)
        finally:
            self.now.put_back()
        if not made.updates and made.error is None:
            raise ProgramError(
                f"the forward of {type(self.net).__name__} ran no reversible program: it must call rg.run, or a module such as "
                "rg.Reversible or rg.ReversibleSequence"
            )
        self._changed |= made.changed
        return made

    def next_step(self) -> None:
        """Go on from the state that the last pass under "store" has left, on another batch."""
        assert self._after is not None
        self.step, self.now = self.step + 1, self._after
        self.now.put_back()

    def _kept(self, made: Pass, memory: Any, error: Exception) -> RetrogradeError:
        """A later step raises an error. If it does on the first batch as well, fn keeps something of an earlier step.

        If it does not, the net does not take the batch that was made for this step.
        """
        place = next(iter(made.changed or self._changed), None)
        if place is None:
            raise error
        self.now.put_back()
        try:
            with instead(memory, verify="off"):
                self._gradients(made, self.given)
        except Exception:
            names = " and its ".join(map(str, self._changed[place]))
            why = f"a later step raises {type(error).__name__}: {error}. fn keeps something of an earlier one, in its {names}"
            made.last = place
            return NotRepeated(why, place.where)
        raise error

    def _finds(self, fn: Any) -> None:
        """A fn, before it is called for the first time."""
        if id(fn) not in self._found:
            self._found.add(id(fn))
            places = self.plain.places_of(fn)
            for snapshot in (self.first, self.now):
                snapshot.add(modules_of(fn), places)

    def _snapshot(self) -> Snapshot:
        modules = dict.fromkeys(m for fn in self.plain.fns for m in modules_of(fn))
        return Snapshot(self.given, modules, self.plain)

    def _initialise(self) -> None:
        """Run the net once if some modules are lazy: a pass would find other modules afterwards than before."""
        lazy = [m for m in self.net.modules() if unmade(m)]
        if not lazy:
            return
        with contextlib.ExitStack() as stack, torch.no_grad():
            stack.callback(self.first.put_back)
            for module in lazy:  # this hook comes after the module's own, which makes its buffers
                hook = module.register_forward_pre_hook(lambda m, _: self.first.keep_made(m))
                stack.callback(hook.remove)
            args, kwargs = tree_map(_fresh, self.given)
            self.net(*args, **kwargs)
        self._look()

    def _gradients(self, made: Pass, given: Any, counters: Iterable[Change] = ()) -> dict[str, Tensor]:
        """All gradients of net under fixed random cotangents, by name."""
        flat, spec = tree_flatten(tree_map(_fresh, given))
        wanted = {name: p for name, p in self.net.named_parameters() if p.requires_grad}
        wanted |= {f"input {i}": t for i, t in enumerate(flat) if isinstance(t, Tensor) and t.requires_grad}
        with torch.enable_grad():  # no leaves, as the output of an embedding is none
            flat = [t.clone() if isinstance(t, Tensor) and t.requires_grad else t for t in flat]
            args, kwargs = tree_unflatten(flat, spec)
            outs = [t for t in tree_leaves(self.net(*args, **kwargs)) if isinstance(t, Tensor) and t.requires_grad]
        generator = torch.Generator().manual_seed(0)
        cotangents = [torch.randn(t.shape, generator=generator, dtype=torch.float64).to(t) for t in outs]
        for change in counters:
            change.place.put(change.name, change.value)
        made.states = python_states()  # what ran after the last fn may have drawn
        with contextlib.ExitStack() as stack:
            for device in {t.device.type for t in outs}:  # backward belongs outside of autocast
                stack.enter_context(torch.autocast(device, enabled=False))
            found = torch.autograd.grad(outs, list(wanted.values()), cotangents, allow_unused=True)
        return {name: torch.zeros_like(p) if g is None else g for (name, p), g in zip(wanted.items(), found, strict=True)}

    def _batch(self) -> Any:
        """The inputs of this step: those given, and then others made of them."""
        if not self.step:
            return self.given
        generator, rows = torch.Generator().manual_seed(self.step), dict[int, Tensor]()
        return tree_map(lambda value: _another(value, generator, rows), self.given)


def _another(value: Any, generator: torch.Generator, rows: dict[int, Tensor]) -> Any:
    """A tensor of the same kind with other values, all of which it has already.

    Of floats, elements drawn again; of ids and masks, rows, so that each stays what it is: the same ones in all such tensors.
    """
    if type(value) not in (Tensor, nn.Parameter) or value.layout is not torch.strided or not value.numel():
        return value
    flat = value.detach().flatten()
    if value.is_complex() or (value.is_floating_point() and value.isfinite().all() and len(flat[:1024].unique()) > 2):
        return flat[torch.randint(len(flat), flat.shape, generator=generator).to(value.device)].view(value.shape)
    dim = next((d for d, size in enumerate(value.shape[:2]) if size > 1), None)  # the tokens of a single sequence
    if dim is None:
        return value
    size = value.shape[dim]
    if size not in rows:
        rows[size] = torch.randint(size, (size,), generator=generator)
        rows[size][-1] = rows[size][0]  # not just the same ones in another order
    return value.detach().index_select(dim, rows[size].to(value.device))


def _fresh(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return value.detach().clone().requires_grad_(value.is_floating_point() or value.is_complex())
