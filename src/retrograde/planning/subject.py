"""What a plan is about: blocks of ours or the user's, or the user's whole model, rebuilt at any depth and input size."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .._base.loading import Refused, called, kind_of, load, one_line
from ..errors import RetrogradeError
from ..models.blocks import DTYPES, net_of
from .trace import Made, Traced, Tracer, nets_of

LONGEST = 1000  # characters of an error


def maker(setting: dict[str, Any], depth: int, seq: int, batch: int, ours: list[Any]) -> Callable[[], Made]:
    """Makes the model and its input; to be called under fake tensors, so that neither takes memory. `ours` gets the shape of the
    input, if a model of the user comes without."""
    if setting["model"] is not None:
        return lambda: _own(setting, depth, seq, batch, ours)
    shape = [batch, *setting["shape"][1:]] if setting["shape"] else [batch, seq, setting["dim"]]

    def make() -> Made:
        return net_of({**setting, "device": "cpu"}, depth), (_input(setting, shape),)

    return make


def takes(setting: dict[str, Any], name: str) -> bool:
    """Whether the size matters to what is planned: a factory of whole models says so by its arguments."""
    if setting["model"] is None:
        return not (name == "seq" and setting["shape"])
    factory = load(setting["model"], "--model")
    return name in _names(factory) or (name in ("seq", "batch") and not _gives_inputs(setting))


def _gives_inputs(setting: dict[str, Any]) -> bool:
    names = _names(load(setting["model"], "--model"))
    return "seq" in names or "batch" in names


def _names(factory: Any) -> set[str]:
    try:
        return set(inspect.signature(factory).parameters)
    except ValueError:  # built in: its parameters are not known
        return set()


def _input(setting: dict[str, Any], shape: list[int]) -> Tensor:
    """Requires a gradient, as what an embedding returns does."""
    return torch.randn(shape, dtype=DTYPES[setting["dtype"]]).requires_grad_()


def sizes_told(setting: dict[str, Any], seq: int, batch: int) -> str:
    """Depth and input in words, as far as they matter."""
    found = [f"depth {setting['depth']}"] if takes(setting, "depth") else []
    if setting["model"] is None:
        shape = [batch, *(setting["shape"][1:] or [seq, setting["dim"]])]
        return ", ".join([*found, f"input {times(shape)}"])
    given = {name: value for name, value in (("batch", batch), ("seq", seq)) if takes(setting, name)}
    if len(given) == 2:
        found.append(f"input {times([batch, seq])}")
    else:
        found += [f"{name} {value}" for name, value in given.items()]
    return ", ".join(found)


def times(shape: list[int]) -> str:
    return " × ".join(map(str, shape))


def _own(setting: dict[str, Any], depth: int, seq: int, batch: int, ours: list[Any]) -> Made:
    spec = setting["model"]
    factory = load(spec, "--model")
    sizes = {"depth": depth, "dim": setting["dim"], "heads": setting["heads"], "seq": seq, "batch": batch}
    names = _names(factory)
    made = called(spec, "--model", factory, **{name: value for name, value in sizes.items() if name in names})
    model, inputs = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(model, nn.Module):
        raise Refused(f"--model {spec} must return a module, or (module, inputs), got {kind_of(model)}")
    if not nets_of(model):
        raise Refused(f"--model {spec}: there is no rg.ReversibleSequence or rg.Reversible in the {type(model).__name__}")
    if setting["dtype"] != "float32":
        model = model.to(DTYPES[setting["dtype"]])
    if inputs is None:
        ours[:] = batch, seq, setting["dim"]
        return model, (_input(setting, ours),)
    return model, inputs if isinstance(inputs, tuple) else (inputs,)


def tracer_of(setting: dict[str, Any]) -> Tracer:
    autocast = None if setting["autocast"] == "none" else DTYPES[setting["autocast"]]
    return Tracer(setting["device"], autocast, setting["compile_budget"])


def traced(tracer: Tracer, setting: dict[str, Any], way: Any, depth: int, seq: int, batch: int) -> Traced:
    """A step at these sizes. Faults of the user's own code are told in a line; a budget that is too small stays an error."""
    own = setting["model"] or setting["block"]
    ours: list[int] = []
    try:
        return tracer.trace(maker(setting, depth, seq, batch, ours), way, (seq, batch))
    except (Refused, RetrogradeError):
        raise
    except Exception as error:
        if own is None:
            raise
        where = [f"--{'model' if setting['model'] else 'block'} {own}", sizes_told(setting, seq, batch)]
        if takes(setting, "depth") and depth != setting["depth"]:
            where.append(f"traced at depth {depth}")
        more = f"; the input was {times(ours)}, for another one return (model, inputs)" if ours else ""
        told_where = ", ".join(part for part in where if part)
        raise Refused(f"{told_where}, on fake tensors: {one_line(error, LONGEST)}{more}") from error
