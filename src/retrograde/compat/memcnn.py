"""In place of `memcnn`: couplings, and a wrapper that trains any module with an inverse without keeping its activations."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import get_device_states as get_device_states
from torch.utils.checkpoint import set_device_states as set_device_states

from .._base.generators import Draws, generators
from ..errors import ProgramError
from ..modules import Net, refuse_hooks
from ..rules import Add, Affine, Rule
from ..update import Update
from ..wirings import invertible, pair
from ._shared import chained

_MEMORY = {-1: "store", 0: "checkpoint", 1: "reverse"}  # by the number of an implementation


class _Coupling(nn.Module):
    """Fm and Gm on the halves of the input along `split_dim`. By itself it runs by ordinary autograd, unless told otherwise."""

    rule: Rule = Add()

    def __init__(
        self,
        Fm: Any,
        Gm: Any = None,
        adapter: Any = None,
        implementation_fwd: int = -1,
        implementation_bwd: int = -1,
        split_dim: int = 1,
    ):
        super().__init__()
        for number in (implementation_fwd, implementation_bwd):
            if number not in _MEMORY:
                raise NotImplementedError(f"unknown implementation {number!r}; known: {', '.join(map(str, _MEMORY))}")
        Gm = copy.deepcopy(Fm) if Gm is None else Gm
        self.Gm = Gm if adapter is None else adapter(Gm)
        self.Fm = Fm if adapter is None else adapter(Fm)
        self.implementation_fwd, self.implementation_bwd, self.split_dim = implementation_fwd, implementation_bwd, split_dim

    def part(self) -> tuple[int, list[Update]]:
        return self.split_dim, pair(self.Fm, self.Gm, rule=self.rule)

    def forward(self, x: Tensor) -> Tensor:
        return chained([self.part()], x, memory=_MEMORY[self.implementation_fwd])

    def inverse(self, y: Tensor) -> Tensor:
        return chained([self.part()], y, back=True, memory=_MEMORY[self.implementation_bwd])


class AdditiveCoupling(_Coupling):
    """x1 += Fm(x2), x2 += Gm(x1); without Gm, a copy of Fm."""

    def __init__(self, Fm: Any, Gm: Any = None, implementation_fwd: int = -1, implementation_bwd: int = -1, split_dim: int = 1):
        super().__init__(Fm, Gm, None, implementation_fwd, implementation_bwd, split_dim)


class AffineCoupling(_Coupling):
    """x1 = x1 * s + t with s, t = Fm(x2), then x2 by Gm(x1). An adapter makes such pairs of what Fm and Gm return."""

    rule = Affine(log=False)


class AdditiveBlock(AdditiveCoupling):
    """The old name of AdditiveCoupling. By itself it saves memory, as `implementation_fwd` is 1 by default."""

    def __init__(self, Fm: Any, Gm: Any = None, implementation_fwd: int = 1, implementation_bwd: int = 1):
        super().__init__(Fm, Gm, implementation_fwd, implementation_bwd)


class AffineBlock(AffineCoupling):
    """The old name of AffineCoupling, without an adapter. By itself it saves memory, as `implementation_fwd` is 1 by default."""

    def __init__(self, Fm: Any, Gm: Any = None, implementation_fwd: int = 1, implementation_bwd: int = 1):
        super().__init__(Fm, Gm, None, implementation_fwd, implementation_bwd)


class AffineAdapterNaive(nn.Module):
    """s = exp(f(x)), t = f(x)."""

    def __init__(self, module: Any):
        super().__init__()
        self.f = module

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        shift = self.f(x)
        return shift.exp(), shift


class AffineAdapterSigmoid(nn.Module):
    """s = sigmoid(h + 2) of the odd channels of h = f(x), t its even channels: f doubles the channels, dim 1."""

    def __init__(self, module: Any):
        super().__init__()
        self.f = module

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.f(x)
        if h.shape[1] % 2:
            raise ProgramError(f"f must return an even number of channels along dim 1, for scale and shift; got {h.shape[1]}")
        return (h[:, 1::2] + 2.0).sigmoid(), h[:, 0::2]


def create_coupling(
    Fm: Any,
    Gm: Any = None,
    coupling: str = "additive",
    implementation_fwd: int = -1,
    implementation_bwd: int = -1,
    adapter: Any = None,
) -> nn.Module:
    """An AdditiveCoupling or an AffineCoupling."""
    if coupling == "additive":
        return AdditiveCoupling(Fm, Gm, implementation_fwd, implementation_bwd)
    if coupling == "affine":
        return AffineCoupling(Fm, Gm, adapter, implementation_fwd, implementation_bwd)
    raise NotImplementedError(f"unknown coupling {coupling!r}; known: additive, affine")


class _Whole:
    """A method of a module, on its argument or the tuple of its arguments."""

    def __init__(self, module: Any, method: str):
        self.module, self.method, self.__name__ = module, method, type(module).__name__
        self.__self__ = module  # as a bound method has it

    def __call__(self, given: Any) -> Any:
        call = self.module if self.method == "forward" else self.module.inverse
        return _alone(call(*given) if isinstance(given, tuple) else call(given))


def _alone(given: Any) -> Any:
    return given[0] if isinstance(given, tuple) and len(given) == 1 else given


def _part(module: Any) -> tuple[int | None, list[Update]]:
    """The updates of a coupling, or of a module with an inverse."""
    module = module._fn if isinstance(module, InvertibleModuleWrapper) else module
    if isinstance(module, _Coupling):
        refuse_hooks(0, module)
        return module.part()
    if not callable(getattr(module, "inverse", None)):
        raise ProgramError(f"{type(module).__name__} has no method inverse, so its input cannot be recovered from its output")
    return None, invertible(_Whole(module, "forward"), _Whole(module, "inverse"))


class InvertibleModuleWrapper(nn.Module):
    """Trains a module with an inverse; its activations are not kept, and with `keep_input=False` its input need not be.

    Nothing is done to the tensors of the caller. Random numbers in couplings are the same in backward, and backward may run as
    often as autograd allows, so `preserve_rng_state` and `num_bwd_passes` have no effect.
    """

    def __init__(
        self,
        fn: Any,
        keep_input: bool = False,
        keep_input_inverse: bool = False,
        num_bwd_passes: int = 1,
        disable: bool = False,
        preserve_rng_state: bool = False,
    ):
        super().__init__()
        self.keep_input, self.keep_input_inverse, self.disable = keep_input, keep_input_inverse, disable
        self.num_bwd_passes, self.preserve_rng_state = num_bwd_passes, preserve_rng_state
        self._fn = fn

    def forward(self, *xin: Tensor) -> Any:
        return self._through(xin, self.keep_input, back=False)

    def inverse(self, *yin: Tensor) -> Any:
        return self._through(yin, self.keep_input_inverse, back=True)

    def _through(self, given: tuple[Tensor, ...], keep: bool, back: bool) -> Any:
        memory = "store" if self.disable else "checkpoint" if keep else "reverse"
        return chained([_part(self)], _alone(given), back=back, memory=memory)


class ReversibleBlock(InvertibleModuleWrapper):
    """A coupling, wrapped."""

    def __init__(
        self,
        Fm: Any,
        Gm: Any = None,
        coupling: str = "additive",
        keep_input: bool = False,
        keep_input_inverse: bool = False,
        implementation_fwd: int = -1,
        implementation_bwd: int = -1,
        adapter: Any = None,
    ):
        fn = create_coupling(Fm, Gm, coupling, implementation_fwd, implementation_bwd, adapter)
        super().__init__(fn, keep_input=keep_input, keep_input_inverse=keep_input_inverse)


class InvertibleSequential(Net, nn.Sequential):
    """In place of `nn.Sequential` around such wrappers, with the same keys: the chain keeps its last output alone.

    Each wrapper by itself keeps its own. Couplings along one dim are one program while they follow each other; so are others.
    """

    def __init__(self, *modules: nn.Module, memory: Any = "reverse", arithmetic: str = "auto"):
        super().__init__(memory, arithmetic)
        for i, module in enumerate(modules):
            _part(module)
            self.add_module(str(i), module)

    def forward(self, x: Any) -> Any:  # type: ignore[override]
        return self._through(x, back=False)

    def inverse(self, y: Any) -> Any:
        return self._through(y, back=True)

    def functions(self) -> list[Any]:
        """All functions, each once."""
        return list(dict.fromkeys(update.fn for module in self for update in _part(module)[1]))

    def _through(self, x: Any, back: bool) -> Any:
        for i, module in enumerate(self):
            refuse_hooks(i, module)
        return chained(
            [_part(module) for module in self], x, back=back, memory=self.memory, arithmetic=self.arithmetic, verify=self.verify
        )


def is_invertible_module(
    module_in: Any,
    test_input_shape: Sequence[Any],
    test_input_dtype: torch.dtype = torch.float32,
    atol: float = 1e-6,
    random_seed: int = 42,
) -> bool:
    """Whether `inverse` undoes `forward`, and the other way round, on random input of this shape (or of several).

    Warns where the same tensor comes up twice among the inputs and outputs of `forward` or of `inverse`.
    """
    module = module_in._fn if isinstance(module_in, InvertibleModuleWrapper) else module_in
    if not hasattr(module, "inverse"):
        return False
    shapes = test_input_shape if isinstance(test_input_shape, (tuple, list)) else None
    if shapes is not None and all(isinstance(size, int) for size in shapes):
        shapes = [shapes]
    if shapes is None or not all(isinstance(s, (tuple, list)) and all(isinstance(size, int) for size in s) for s in shapes):
        raise ValueError(f"test_input_shape is a shape, or a tuple of shapes; got {test_input_shape!r}")
    forward, inverse = _Whole(module, "forward"), _Whole(module, "inverse")
    present = Draws(generators([]))
    try:
        with torch.no_grad():
            torch.manual_seed(random_seed)
            given = _alone(tuple(torch.rand(*shape, dtype=test_input_dtype) for shape in shapes))
            made = forward(given)
            back = inverse(made)
            found = _close(back, given, atol) and _close(forward(back), made, atol)
    finally:
        present.put_back()
    shared = _shared("forward", given, made) or _shared("inverse", made, back)
    if found and shared:
        warnings.warn(f"{type(module).__name__}: {shared}", stacklevel=2)
    return found


def _shared(method: str, given: Any, made: Any) -> str | None:
    """What to warn of where outputs are one tensor, or one that was given."""
    inputs, outputs = _several(given), _several(made)
    if len(set(outputs)) < len(outputs):
        return f"{method} returns the same tensor for several outputs. Return copies"
    if not set(inputs).isdisjoint(outputs):
        return f"{method} returns a tensor that it was given, so a wrapper around it saves no memory"
    return None


def _several(given: Any) -> tuple[Any, ...]:
    return given if isinstance(given, tuple) else (given,)


def _close(found: Any, true: Any, atol: float) -> bool:
    found, true = _several(found), _several(true)
    same = len(found) == len(true) and all(a.shape == b.shape for a, b in zip(found, true, strict=True))
    return same and all(torch.allclose(a, b, atol=atol) for a, b in zip(found, true, strict=True))
