"""What a factory of the user's makes, as a net and its inputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import retrograde as rg

from .._base.loading import Refused, kind_of, load, sized
from .._base.report import counted
from .._base.torch_private import tree_leaves, tree_map
from ..models.blocks import DTYPES, Attention, mlp
from ..modules import Net

MAY = "(f, g), a module with f and g, a list of rg.Update, a net that runs programs, (net, inputs) or (net, inputs, side)"
SIZES = ("dim", "depth", "seq", "batch", "heads")  # that a factory may ask for


@dataclass
class Given:
    """A net and what it is called with: `net(*inputs, **side)`."""

    net: nn.Module
    inputs: tuple[Any, ...]
    side: dict[str, Any]
    blocks: int | None = None  # made of so many blocks of the factory

    @property
    def programs(self) -> list[Net]:
        """The reversible nets in it. A module that calls rg.run has none."""
        return _programs(self.net)

    def what(self) -> str:
        """Sizes, in a line."""
        shapes = [_shape(t) for t in tree_leaves((self.inputs, self.side)) if isinstance(t, Tensor)]
        blocks = "" if self.blocks is None else f"{counted(self.blocks, 'block')}, "
        more = f" and {len(shapes) - 3} more" if len(shapes) > 3 else ""
        return f"{blocks}input {', '.join(shapes[:3])}{more}"


def _programs(net: nn.Module) -> list[Net]:
    return [m for m in net.modules() if isinstance(m, Net)]


def _is_block(made: nn.Module) -> bool:
    return all(callable(getattr(made, name, None)) for name in "fg")


def given_net(spec: str | None, option: str, setting: dict[str, Any]) -> Given:
    """Calls the factory. `setting` has the `SIZES`, shape, dtype (None: as it is), device and seed."""
    torch.manual_seed(setting["seed"])
    make = _maker(spec, option, setting)
    made = make()
    if isinstance(made, (tuple, list)) and made and all(isinstance(one, rg.Update) for one in made):
        made = rg.Reversible(made)
    if isinstance(made, nn.Module) and (_programs(made) or not _is_block(made)):
        return _ready(Given(made, _inputs(made, setting), {}), setting)
    if isinstance(made, (tuple, list)) and len(made) in (2, 3) and isinstance(made[0], nn.Module) and not callable(made[1]):
        net, inputs, side = made[0], made[1], made[2] if len(made) == 3 else {}
        if not isinstance(side, dict):
            raise Refused(f"{option} {spec} returned (net, inputs, side) with {kind_of(side)} for side, not a dict")
        return _ready(Given(net, inputs if isinstance(inputs, tuple) else (inputs,), side), setting)
    try:
        blocks = [made, *(make() for _ in range(setting["depth"] - 1))]
        net = rg.ReversibleSequence(blocks)
    except rg.ProgramError as error:
        raise Refused(f"{option} {spec} must return {MAY}: {error}") from error
    return _ready(Given(net, _inputs(net, setting), {}, len(blocks)), setting)


def _maker(spec: str | None, option: str, setting: dict[str, Any]) -> Callable[[], Any]:
    if spec is None:
        return lambda: (Attention(setting["dim"], setting["heads"]), mlp(setting["dim"]))
    return sized(spec, option, load(spec, option), {name: setting[name] for name in SIZES})


def _inputs(net: nn.Module, setting: dict[str, Any]) -> tuple[Any, ...]:
    """A tensor of the shape, in the precision of the net; for a list of updates one for each stream."""
    generator = torch.Generator().manual_seed(setting["seed"])
    dtype = next((p.dtype for p in net.parameters() if p.is_floating_point()), torch.float32)

    def draw() -> Tensor:
        return torch.randn(setting["shape"], generator=generator).to(dtype)

    return ({name: draw() for name in sorted(net.program.names)} if isinstance(net, rg.Reversible) else draw(),)


def _ready(given: Given, setting: dict[str, Any]) -> Given:
    """On the device, and in the dtype if one is asked for."""
    device, dtype = setting["device"], DTYPES[setting["dtype"]] if setting["dtype"] else None

    def there(t: Any) -> Any:
        return t.to(device, dtype if t.is_floating_point() else None) if isinstance(t, Tensor) else t

    given.net.to(device, dtype)
    given.inputs, given.side = tree_map(there, given.inputs), tree_map(there, given.side)
    return given


def _shape(t: Tensor) -> str:
    return f"{' × '.join(map(str, t.shape)) or 'a number'} {str(t.dtype).removeprefix('torch.')}"
