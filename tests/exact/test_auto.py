"""arithmetic="auto": exact where 16 bits compute, and what exact arithmetic refuses."""

import functools
import re
import warnings

import pytest
import torch
from exact_support import (
    DRIFTS,
    MEMORIES,
    SETTINGS,
    SHORT,
    Case,
    Fn,
    amp,
    assert_equal,
    draw,
    hidden,
    observed,
    sequence,
    store_too,
    wired,
)
from support import every_pair, loss_of, name_of, rg
from torch import nn

# -- the default -------------------------------------------------------------------------------------------------------


def deep(depth, setting, gain, width=16, rows=8):
    """A net as one builds it, without a word about arithmetic; its last linear layers scaled by `gain`."""
    torch.manual_seed(3)

    def fn():
        made = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        with torch.no_grad():
            made[-1].weight *= gain
        return made

    dtype, autocast = SETTINGS[setting]
    return rg.ReversibleSequence([(fn(), fn()) for _ in range(depth)]).to(dtype), draw(rows, width, dtype=dtype), autocast


def relative_error(net, x, autocast):
    """Of all gradients as one vector, against store."""
    found, memory = [], net.memory
    for net.memory in (memory, "store"):
        with amp(autocast):
            loss = net(x).float().sin().sum()
        found.append(torch.cat([g.double().flatten() for g in torch.autograd.grad(loss, [x, *net.parameters()])]))
    net.memory = memory
    return float((found[0] - found[1]).norm() / found[1].norm())


def safe(*args):
    net, x, autocast = deep(*args)
    assert net.arithmetic == "auto"
    error = relative_error(net, x, autocast)
    assert error <= 1e-3
    return net, x, autocast


@pytest.mark.parametrize("gain", [1.0, 2.0])
@pytest.mark.parametrize("setting", SHORT)
def test_default_is_safe(setting, gain):
    safe(32, setting, gain)


@pytest.mark.slow
@pytest.mark.parametrize("gain", [1.0, 2.0])
@pytest.mark.parametrize("setting", SHORT)
def test_default_is_safe_at_256(setting, gain):
    """And float is not (under autocast by 1e-3 to 4e-3 here, with a margin for other machines)."""
    net, x, autocast = safe(256, setting, gain, 32, 16)
    net.arithmetic, net.verify = "float", "off"
    assert relative_error(net, x, autocast) > (1e-3 if autocast is None else 5e-4)


@DRIFTS
@pytest.mark.parametrize("setting", ["bfloat16", "float16"])
def test_float_is_not_safe(setting):
    """The test above can fail."""
    net, x, autocast = deep(32, setting, 2.0)
    net.arithmetic, net.verify = "float", "off"
    assert relative_error(net, x, autocast) > 1e-3


def chosen(updates, streams, setting="float32", **options):
    """What "auto" is like: "exact", "float", or neither."""
    outs = {}
    for arithmetic in ("auto", "exact", "float"):
        torch.manual_seed(0)
        with amp(SETTINGS[setting][1]):
            outs[arithmetic] = rg.run(updates, streams, arithmetic=arithmetic, **options)
    alike = [name for name in ("exact", "float") if all(torch.equal(outs["auto"][k], outs[name][k]) for k in streams)]
    assert len(alike) == 1, f"auto is like {alike}"
    return alike[0]


def sixteen_bit_lambda(module):
    return lambda x: module(x.bfloat16())


class Into(nn.Module):
    """Casts its input to what its module is in."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, x):
        return self.module(x.to(next(self.module.parameters()).dtype))


CHOICES = {
    "a net in float32": ("float", "float32", lambda: [Fn() for _ in range(8)]),
    "a net in float64": ("float", "float64", lambda: [Fn().double() for _ in range(8)]),
    "one fn of many has 16 bits": (
        "exact", "float32", lambda: [*(Fn() for _ in range(7)), Into(Fn().bfloat16())],
    ),
    "one in float16": ("exact", "float32", lambda: [*(Fn() for _ in range(7)), Into(Fn().half())]),
    "a lambda over such a module": ("exact", "float32", lambda: [*(Fn() for _ in range(7)), sixteen_bit_lambda(Fn().bfloat16())]),
    "a partial of a method": (
        "exact", "float32", lambda: [*(Fn() for _ in range(7)), functools.partial(Into(Fn().bfloat16()).forward)],
    ),
    "bf16 autocast": ("exact", "bf16 autocast", lambda: [Fn() for _ in range(8)]),
    "fp16 autocast": ("exact", "fp16 autocast", lambda: [Fn() for _ in range(8)]),
    "16-bit streams, fns in float32": ("exact", "bfloat16", lambda: [Into(Fn()) for _ in range(8)]),
}  # fmt: skip


@pytest.mark.parametrize("name", CHOICES)
@pytest.mark.parametrize("memory", ["reverse", "store", rg.Anchor(3)], ids=str)
def test_auto(name, memory):
    """Exact where something computes in 16 bits, float elsewhere; the same under every policy."""
    choice, setting, make = CHOICES[name]
    dtype = SETTINGS[setting][0]
    streams = {"a": draw(dtype=dtype), "b": draw(dtype=dtype)}
    assert chosen(rg.wirings.leapfrog(make()), streams, setting, memory=memory) == choice


def test_auto_of_one_stream_in_16_bits():
    """One is enough, even if it is only read."""
    streams = {"a": draw(), "b": draw(), "c": draw(dtype=torch.bfloat16)}
    updates = [rg.Update("a", lambda x, c: (x + c).sin(), ("b", "c")), rg.Update("b", torch.nn.Tanh(), "a")] * 4
    assert chosen(updates, streams) == "exact"


@pytest.mark.parametrize("setting", SHORT)
def test_default_is_equal_to_the_bit(setting, recovered):
    case = wired("cross", setting, 4)
    found = case.observed("reverse", "auto")
    assert recovered.apart == 0
    assert_equal(found, case.observed("store", "auto"))


@pytest.mark.parametrize(
    ("memory", "arithmetic"),
    [
        ("reverse", "auto"),
        ("reverse", "float"),
        ("reverse", "exact"),
        ("store", "auto"),
        ("checkpoint", "auto"),
        (rg.StoreLast(2), "auto"),
    ],
    ids=str,
)
def test_hidden_autocast_is_no_fault(memory, arithmetic):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loss_of(rg.run(*hidden(), memory=memory, arithmetic=arithmetic)).backward()


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["fixed", "", "Exact", None])
def test_unknown_name(name):
    with pytest.raises(rg.ProgramError, match=r"unknown arithmetic .*known: auto, exact, float"):
        rg.run(*hidden(), arithmetic=name)
    with pytest.raises(rg.ProgramError, match=r"unknown arithmetic .*known: auto, exact, float"):
        sequence(1, "reverse", name)


class Pair(nn.Module):
    """log_scale and shift."""

    def __init__(self):
        super().__init__()
        self.scale, self.shift = Fn(dropout=0.0), Fn(dropout=0.0)

    def forward(self, x):
        return 0.3 * self.scale(x).tanh(), self.shift(x)


def affine():
    return [rg.Update("a", Fn(), "b"), rg.Update("b", Pair(), "a", rule=rg.Affine())]


@store_too
@pytest.mark.parametrize("way", [rg.run, rg.invert])
def test_affine_has_no_exact_form(memory, way):
    which = {rg.run: r"update 1: b \*\+= Pair\(a\)", rg.invert: r"update 0: b undo \*\+= Pair\(a\)"}[way]
    with pytest.raises(rg.ProgramError, match=rf"{which}.*arithmetic='exact' is for additions"):
        way(affine(), {"a": draw(), "b": draw()}, memory=memory, arithmetic="exact")


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("memory", ["reverse", "store", "checkpoint"])
def test_affine_in_16_bits(memory, seed):
    """As float, with a warning where it drifts; the stream that is only added to is exact, and drifts with what it reads."""
    torch.manual_seed(seed)
    updates = affine() * 2
    fns = nn.ModuleList({id(u.fn): u.fn for u in updates}.values()).bfloat16()
    streams = {"a": draw(dtype=torch.bfloat16), "b": draw(dtype=torch.bfloat16)}
    wanted = [*streams.values(), *fns.parameters()]

    def make(memory, arithmetic="auto"):
        return rg.run(updates, streams, memory=memory, arithmetic=arithmetic)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = observed(lambda: make(memory), wanted)
    assert not caught or (memory == "reverse" and "drifted" in str(caught[0].message))
    true = observed(lambda: make("store"), wanted)
    for a, b in zip(found, true, strict=True):
        torch.testing.assert_close(a, b, rtol=0.1, atol=0.1)


def test_complex_streams():
    a = {name: torch.randn(3, dtype=torch.complex64) for name in "ab"}
    with pytest.raises(rg.ProgramError, match=r"complex numbers.*'a'.*arithmetic='float'"):
        rg.run(rg.wirings.leapfrog([torch.sin, torch.cos]), a, arithmetic="exact")
    nested = {"a": {"x": torch.zeros(3), "z": a["a"]}, "b": torch.zeros(3)}
    with pytest.raises(rg.ProgramError, match=r"complex numbers.*'a'"):
        rg.run([rg.Update("a", lambda x: {"x": x, "z": x + 0j}, "b")], nested, arithmetic="exact")


def test_complex_streams_beside_16_bits():
    """Under auto they are added to in float, and the others exactly."""
    z, x = torch.randn(3, dtype=torch.complex64, requires_grad=True), draw(3, dtype=torch.bfloat16)
    updates = [rg.Update("z", lambda x: x.sin().to(torch.complex64), "x"), rg.Update("x", lambda z: z.real.cos(), "z")] * 4
    results = []
    for memory in ("reverse", "store"):
        out = rg.run(updates, {"z": z, "x": x}, memory=memory)
        results.append(torch.autograd.grad(out["x"].double().sum() + out["z"].abs().sum(), [z, x]))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=0.02, atol=0.02)


@pytest.mark.parametrize(("setting", "memory"), every_pair(["float32", "float64", "bfloat16"], ["store", *MEMORIES]), ids=name_of)
def test_fn_edits_its_source(memory, setting):
    """The same error as under float."""
    messages = []
    for arithmetic in ("exact", "float"):
        torch.manual_seed(0)
        case = Case(setting, rg.wirings.leapfrog([Fn(), lambda x: x.mul_(2).sin(), Fn()]), {"a": draw(), "b": draw()})
        with pytest.raises(rg.ProgramError, match=r"update 1: b \+= <lambda>\(a\): fn edited its source 'a' in place") as info:
            case.out(memory, arithmetic)
        messages.append(str(info.value))
    assert messages[0] == messages[1]


def refused_or_right(step, memory):
    """An error about the edit, or what store gives for the same without one."""
    try:
        found = step(memory, True)
    except RuntimeError as error:
        found = error
    if isinstance(found, RuntimeError):
        assert re.search("in place|inplace", str(found))
    else:
        assert_equal([*found, None], [*step("store", False), None])


@pytest.mark.parametrize(
    ("name", "setting", "memory"),
    every_pair(["a", "b"], ["float32", "float64", "bf16 autocast", "bfloat16"], MEMORIES),
    ids=name_of,
)
def test_output_is_edited(memory, setting, name):
    """After the forward pass."""
    case = Case(setting, rg.wirings.leapfrog([Fn(dropout=0.0) for _ in range(6)]), {"a": draw(), "b": draw()})

    def step(memory, edit):
        out = case.out(memory)
        if edit:
            out[name].mul_(3.0)
        else:
            out[name] = out[name] * 3.0
        return torch.autograd.grad(loss_of([t.double() for t in out.values()]), case.wanted)

    refused_or_right(step, memory)


@pytest.mark.parametrize(
    ("setting", "memory"), every_pair(["float32", "float64", "bf16 autocast", "bfloat16"], MEMORIES), ids=name_of
)
def test_input_is_edited(memory, setting):
    """The streams that were given, after the forward pass."""
    start = {"a": draw(grad=False), "b": draw(grad=False)}
    case = Case(setting, rg.wirings.leapfrog([Fn(dropout=0.0) for _ in range(6)]), start)

    def step(memory, edit):
        given = {k: t.clone() for k, t in case.streams.items()}
        with amp(case.autocast):
            out = rg.run(case.updates, given, memory=memory, arithmetic="exact")
        if edit:
            for t in given.values():
                t.zero_()
        return torch.autograd.grad(loss_of([t.double() for t in out.values()]), case.wanted)

    refused_or_right(step, memory)
