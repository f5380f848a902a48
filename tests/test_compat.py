"""The drop-in replacements, without the original packages: right by hand, and right where the originals are not."""

import copy
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from support import REPLAYED, WIDTH, Attend, assert_same, draw, gradients, loss_of, mlp, rg
from torch import nn
from torch.func import functional_call
from torch.nn.utils.parametrizations import spectral_norm

from retrograde.compat import axial_attention, nuwa, nuwa_video_audio, reformer, se3_transformer

SELF, CROSS, INTER = nuwa_video_audio.BLOCKS
TYPES = (SELF, CROSS, INTER)


class Look(nn.Module):
    """Attention over a context, or over itself, with both masks, and dropout."""

    def __init__(self, dropout=0.0):
        super().__init__()
        self.attend, self.drop = Attend(), nn.Dropout(dropout)

    def forward(self, x, context=None, mask=None, context_mask=None):
        out = self.drop(self.attend(x, context, None if context_mask is None else context_mask[:, None]))
        return out if mask is None else out * mask[..., None]


class Turned(nn.Module):
    """A function on channels first."""

    def __init__(self, fn):
        super().__init__()
        self.fn = fn

    def forward(self, x, **side):
        return self.fn(x.transpose(1, 2), **side).transpose(1, 2)


class Each(nn.Module):
    """A function of a dict: other functions for other keys, in the reversed order, with a key too many."""

    def __init__(self, make):
        super().__init__()
        self.fns = nn.ModuleDict({"1": make(), "0": make()})

    def forward(self, x, **side):
        out = {key: fn(x[key].flatten(1, -2), **side).view_as(x[key]) for key, fn in self.fns.items()}
        return {"extra": out["0"].sum(), **out}


@dataclass
class System:
    """A net with its inputs, and the same by hand: plain PyTorch on the functions inside the net."""

    net: Any
    inputs: tuple
    side: dict
    by_hand: Any
    route: dict = field(default_factory=dict)  # arguments of forward that are no side inputs

    def __call__(self):
        return self.net(*self.inputs, **self.side, **self.route)

    def hand(self):
        return self.by_hand(self.net, self.inputs, self.side)

    @property
    def wanted(self):
        leaves = torch.utils._pytree.tree_leaves((self.inputs, self.side))
        return [t for t in leaves if isinstance(t, torch.Tensor) and t.requires_grad] + list(self.net.parameters())

    def with_context(self, context):
        return System(self.net, self.inputs, self.side | {"context": context}, self.by_hand, self.route)


def pairs_by_hand(blocks, x1, x2, f_args, g_args):
    for block in blocks:
        x1 = x1 + block.f.net(x2, **f_args)
        x2 = x2 + block.g.net(x1, **g_args)
    return x1, x2


def a_reformer(depth, make, **options):
    def by_hand(net, inputs, side):
        return torch.cat(pairs_by_hand(net.blocks, *inputs[0].chunk(2, 2), side, side), 2)

    net = reformer.ReversibleSequence([(make(), make()) for _ in range(depth)], **options)
    return System(net, (draw(2, 5, 2 * WIDTH),), {"context": draw(2, 4, WIDTH)}, by_hand, {"arg_route": (True, True)})


def an_axial(depth, make, **options):
    def by_hand(net, inputs, side):
        x1, x2 = pairs_by_hand(net.blocks, *inputs * 2, side, side)
        return (x1 + x2) / 2

    net = axial_attention.ReversibleSequence([(Turned(make()), Turned(make())) for _ in range(depth)], **options)
    return System(net, (draw(2, WIDTH, 5),), {"context": draw(2, 4, WIDTH)}, by_hand)


def an_se3(depth, make, **options):
    def by_hand(net, inputs, side):
        x1, x2 = dict(inputs[0]), dict(inputs[0])
        for block in net.blocks:
            out = block.f.net(x2, **side)
            x1 = {key: x1[key] + out[key] for key in x1}
            out = block.g.net(x1)
            x2 = {key: x2[key] + out[key] for key in x2}
        return {key: (x1[key] + x2[key]) / 2 for key in x1}

    net = se3_transformer.ReversibleSequence([(Each(make), Each(make)) for _ in range(depth)], **options)
    return System(net, ({"0": draw(2, 5, WIDTH), "1": draw(2, 3, 2, WIDTH)},), {"context": draw(2, 4, WIDTH)}, by_hand)


def a_nuwa(depth, make, **options):
    route = {
        "context": [(i > 0, i < 2) for i in range(depth)],
        "mask": [(True, False)] * depth,
        "nobody": [(False, False)] * depth,
    }

    def by_hand(net, inputs, side):
        x1, x2 = inputs * 2
        for i, block in enumerate(net.blocks):
            x1 = x1 + block.f.net(x2, mask=side["mask"], **({"context": side["context"]} if i > 0 else {}))
            x2 = x2 + block.g.net(x1, **({"context": side["context"]} if i < 2 else {}))
        return x1 + x2

    net = nuwa.ReversibleSequence([(make(), make()) for _ in range(depth)], route, **options)
    side = {"context": draw(2, 4, WIDTH), "mask": torch.rand(2, 5) > 0.3, "nobody": 1, "strange": object()}
    return System(net, (draw(2, 5, WIDTH),), side, by_hand)


def a_dual(depth, make, **options):
    def by_hand(net, inputs, side):
        (x1, m1), (x2, m2) = inputs, inputs
        video, audio = side["video_mask"], side["audio_mask"]
        context = {"context": side["context"], "context_mask": side["context_mask"]}
        for kind, block in zip(net.block_types, net.blocks, strict=True):
            f, g, j, k = block.f.net, block.g.net, block.j.net, block.k.net
            if kind == INTER:
                x1 = x1 + f(x2, m2, mask=video, context_mask=audio)
                x2 = x2 + k(x1)
                m1 = m1 + j(m2, x2, mask=audio, context_mask=video)
                m2 = m2 + g(m1)
            else:
                x1 = x1 + (f(x2, **context, mask=video) if kind == CROSS else f(x2))
                x2 = x2 + g(x1)
                m1 = m1 + (j(m2, **context, mask=audio) if kind == CROSS else j(m2))
                m2 = m2 + k(m1)
        return [(x1 + x2) / 2, (m1 + m2) / 2]

    types = [TYPES[(i + 1) % 3] for i in range(depth)]
    net = nuwa_video_audio.DualModalityReversibleSequence([[make() for _ in range(4)] for _ in types], types, **options)
    masks = {name: torch.rand(2, n) > 0.3 for name, n in (("context_mask", 4), ("video_mask", 5), ("audio_mask", 3))}
    for mask in masks.values():
        mask[:, 0] = True
    return System(net, (draw(2, 5, WIDTH), draw(2, 3, WIDTH)), {"context": draw(2, 4, WIDTH), **masks}, by_hand)


SYSTEMS = {
    "reformer": a_reformer,
    "axial_attention": an_axial,
    "se3_transformer": an_se3,
    "nuwa": a_nuwa,
    "nuwa_video_audio": a_dual,
}
every_system = pytest.mark.parametrize("system", SYSTEMS)


def build(system, depth=3, dropout=0.0, make=None, **options):
    return SYSTEMS[system](depth, make or (lambda: Look(dropout)), **options)


# -- outputs and gradients ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dropout", [0.0, 0.25])
@pytest.mark.parametrize("depth", [1, 3, 12])
@every_system
def test_outputs_and_gradients_are_those_by_hand(system, depth, dropout):
    """Of the inputs, of the side inputs and of all parameters."""
    it = build(system, depth, dropout)
    assert_same(gradients(it, it.wanted), gradients(it.hand, it.wanted))


@pytest.mark.parametrize("options", [{"memory": "store"}, {"memory": rg.StoreLast(3)}, {"arithmetic": "exact"}], ids=str)
@every_system
def test_memory_and_arithmetic_are_arguments(system, options):
    it = build(system, **options)
    tolerance = 1e-5 if "arithmetic" in options else 1e-9  # a grid of 2^-24
    assert_same(gradients(it, it.wanted), gradients(it.hand, it.wanted), tolerance)


@every_system
def test_each_function_runs_once_more_in_backward(system):
    """So the net is reversed, and not stored."""
    it = build(system)
    again = []
    for block in it.net.blocks:
        block.f.net.register_forward_hook(lambda *_: again.append(rg.replaying()))
    loss = loss_of(it())
    assert again == [False] * 3
    loss.backward()
    assert again == [False] * 3 + [True] * 3


# -- where the originals are wrong -------------------------------------------------------------------------------------


@every_system
def test_an_input_without_grad(system):
    it = build(system)
    for t in torch.utils._pytree.tree_leaves(it.inputs):
        t.requires_grad_(False)
    assert_same(gradients(it, it.wanted), gradients(it.hand, it.wanted))


@every_system
def test_context_of_an_encoder(system):
    """Its backward runs once, whoever takes it: both f and g do, but in se3_transformer."""
    it, encoder, source = build(system), mlp(), draw(2, 4, WIDTH, grad=False)
    calls = []

    def out(call):
        context = encoder(source)
        context.register_hook(lambda _: calls.append(call))
        return getattr(it.with_context(context), call)()

    wanted = [*encoder.parameters(), *it.net.parameters()]
    assert_same(gradients(lambda: out("__call__"), wanted), gradients(lambda: out("hand"), wanted))
    assert calls == ["__call__", "hand"]


def in_dtype(dtype, it):
    def cast(t):
        return t.detach().to(dtype).requires_grad_() if isinstance(t, torch.Tensor) and t.is_floating_point() else t

    it.net.to(dtype)
    it.inputs, it.side = torch.utils._pytree.tree_map(cast, (it.inputs, it.side))
    return it


@every_system
def test_autocast_in_the_forward_pass_alone(system):
    """To the bit what ordinary autograd gives."""
    it = in_dtype(torch.float32, build(system, 6, dropout=0.25))

    def step():
        with torch.autocast("cpu", torch.bfloat16):
            return it()

    found = gradients(step, it.wanted)
    it.net.memory = "store"
    assert all(map(torch.equal, found, gradients(step, it.wanted)))

    def by_hand():
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
            return it.hand()

    assert_same(found, gradients(by_hand, it.wanted), 2e-2)


@every_system
def test_bfloat16_at_depth_64(system):
    """To the bit what ordinary autograd gives; the originals are off by tens of percent."""
    it = in_dtype(torch.bfloat16, build(system, 64))
    found = gradients(it, it.wanted)
    it.net.memory = "store"
    assert all(map(torch.equal, found, gradients(it, it.wanted)))


@every_system
def test_two_forward_passes_before_a_backward(system):
    it = build(system, dropout=0.25)

    def twice(call):
        return [call(), call()]

    assert_same(gradients(lambda: twice(it), it.wanted), gradients(lambda: twice(it.hand), it.wanted))


class Normed(nn.Module):
    """BatchNorm over all but the last dim, and a spectral norm."""

    def __init__(self):
        super().__init__()
        self.norm, self.linear = nn.BatchNorm1d(WIDTH), spectral_norm(nn.Linear(WIDTH, WIDTH))
        self.double()

    def forward(self, x, *_, **__):
        return self.linear(self.norm(x.flatten(0, -2)).view_as(x)).tanh()


@every_system
def test_buffers_move_once(system):
    """Statistics and power iterations are where one forward pass leaves them, and the gradients are right."""
    it = build(system, make=Normed)
    twin = copy.deepcopy(it)
    assert_same(gradients(it, it.net.parameters()), gradients(twin.hand, twin.net.parameters()))
    found, true = dict(it.net.named_buffers()), dict(twin.net.named_buffers())
    assert found.keys() == true.keys()
    for name, buffer in found.items():
        torch.testing.assert_close(buffer, true[name], msg=name)
        assert not name.endswith("num_batches_tracked") or buffer == 1


@pytest.mark.parametrize("tie_weights", [True, False])
@every_system
def test_functional_call(system, tie_weights):
    """Gradients reach the tensors that were given, with their values."""
    it = build(system)
    twin = copy.deepcopy(it)
    given = {name: (p.detach() * 1.5).requires_grad_() for name, p in it.net.named_parameters()}
    wanted = [t for t in it.wanted if not isinstance(t, nn.Parameter)] + list(given.values())

    def call():
        return functional_call(it.net, given, it.inputs, it.side | it.route, tie_weights=tie_weights)

    with torch.no_grad():
        for p in twin.net.parameters():
            p *= 1.5
    assert_same(gradients(call, wanted), gradients(twin.hand, twin.wanted))


@every_system
def test_double_backward(system):
    it = build(system, 2)

    def penalty(call):
        first = torch.autograd.grad(loss_of(call()), it.wanted[:1], create_graph=True)
        return [t.square().sum() for t in first]

    assert_same(gradients(lambda: penalty(it), it.wanted), gradients(lambda: penalty(it.hand), it.wanted))


@every_system
def test_output_edited_in_place(system):
    it = build(system)

    def edited(call):
        out = call()
        for t in torch.utils._pytree.tree_leaves(out):
            t.mul_(2)
        return out

    assert_same(gradients(lambda: edited(it), it.wanted), gradients(lambda: edited(it.hand), it.wanted))


@every_system
def test_parameter_changed_before_backward(system):
    it = build(system)
    loss = loss_of(it())
    with torch.no_grad():
        next(it.net.blocks[1].f.parameters()).add_(1)
    with pytest.raises(
        rg.ReplayError, match=r"the parameter 'weight' of shape .* was changed between the forward pass and backward"
    ):
        loss.backward()


@every_system
def test_backward_in_eval(system):
    """On a net that was never run in training."""
    it = build(system, dropout=0.5)
    it.net.eval()
    assert_same(gradients(it, it.wanted), gradients(it.hand, it.wanted))


@every_system
def test_shapes_that_do_not_fit(system):
    it = build(system)
    fn = it.net.blocks[1].f.net
    fn.forward = lambda x, *_, **__: torch.zeros(7, dtype=torch.float64)
    with pytest.raises(rg.ProgramError, match=rf"update \d: x1 \+= {type(fn).__name__}\(x2.*\): fn returned"):
        it()


@every_system
def test_hooks_on_a_block_would_not_run(system):
    it = build(system)
    it.net.blocks[1].register_forward_hook(lambda *_: None)
    with pytest.raises(rg.ProgramError, match=r"block 1, a Reversible.*Block, has hooks that would never run"):
        it()


# -- reformer ----------------------------------------------------------------------------------------------------------


class Told(nn.Module):
    """Writes down the signals it gets."""

    def __init__(self, log, name):
        super().__init__()
        self.fn, self.log, self.name = mlp(), log, name

    def forward(self, x, **signals):
        self.log.append((self.name, signals.get("_reverse"), signals.get("_depth")))
        return self.fn(x)


def told(depth=2, send_signal=True, **options):
    log = []
    blocks = [(Told(log, "f"), Told(log, "g")) for _ in range(depth)]
    return reformer.ReversibleSequence(blocks, send_signal=send_signal, **options), log


def both_halves(length=5):
    return draw(2, length, 2 * WIDTH)


@pytest.mark.parametrize("memory", REPLAYED)
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_signals(training, memory):
    """`_reverse` in the second run, but not in eval, where nothing was cached."""
    net, log = told(memory=memory)
    net.train(training)
    loss = loss_of(net(both_halves()))
    assert log == [("f", False, 0), ("g", False, 0), ("f", False, 1), ("g", False, 1)]
    log.clear()
    loss.backward()
    assert log == [("g", training, 1), ("f", training, 1), ("g", training, 0), ("f", training, 0)]


def test_signals_go_beside_the_arguments_whatever_the_route():
    seen = []

    def fn(x, **given):
        seen.append(sorted(given))
        return x.sin()

    net = reformer.ReversibleSequence([(fn, fn)], send_signal=True)
    net(both_halves(), mask=None)
    net(both_halves(), arg_route=(False, True), mask=None, _depth=7)
    net(both_halves(), arg_route=(False, False), mask=None)
    both, signals = ["_depth", "_reverse", "mask"], ["_depth", "_reverse"]
    assert seen == [both, signals, signals, both, signals, signals]


def test_no_signals_unless_asked_for():
    net, log = told(send_signal=False)
    net(both_halves())
    assert set(log) == {("f", None, None), ("g", None, None)}


@pytest.mark.parametrize(("length", "reversed_"), [(4, False), (5, False), (6, True)])
def test_reverse_thres(length, reversed_):
    """At it and under it ordinary autograd without signals, above it reversal."""
    net, log = told(reverse_thres=5)
    loss = loss_of(net(both_halves(length)))
    first = list(log)
    loss.backward()
    if reversed_:
        assert len(log) == 8
        assert first[0] == ("f", False, 0)
    else:
        assert log == first == [("f", None, None), ("g", None, None)] * 2


@pytest.mark.parametrize("thres", [0, 5], ids=["above the threshold", "under the threshold"])
@pytest.mark.parametrize("p", [0.3, 0.6, 1.0])
def test_layer_dropout(p, thres):
    """The blocks that a seed keeps, by one draw before all others; their gradients, and none for the rest."""
    it = build("reformer", 5, 0.25, layer_dropout=p, reverse_thres=thres)

    def hand():
        dropped = torch.empty(5).uniform_(0, 1) < p
        kept = [block for block, drop in zip(it.net.blocks, dropped, strict=True) if not drop] or it.net.blocks[:1]
        return torch.cat(pairs_by_hand(kept, *it.inputs[0].chunk(2, 2), it.side, it.side), 2)

    for seed in range(4):
        assert_same(gradients(it, it.wanted, seed), gradients(hand, it.wanted, seed))


def test_layer_dropout_keeps_the_depths():
    net, log = told(6, layer_dropout=0.5)
    x = both_halves()
    torch.manual_seed(1)
    dropped = torch.empty(6).uniform_(0, 1) < 0.5
    torch.manual_seed(1)
    net(x)
    kept = [i for i, drop in enumerate(dropped.tolist()) if not drop]
    assert 0 < len(kept) < 6
    assert [depth for _, _, depth in log] == [i for i in kept for _ in range(2)]


def test_layer_dropout_is_for_training():
    net, log = told(layer_dropout=1.0)
    net.eval()
    x, state = both_halves(), torch.get_rng_state()
    net(x)
    assert len(log) == 4
    assert torch.equal(torch.get_rng_state(), state)


class Cached(nn.Module):
    """As LSH attention does: random numbers are drawn, cached by depth, and in the second run read from the cache."""

    def __init__(self):
        super().__init__()
        self.fn, self.cache = mlp(), {}

    def forward(self, x, _reverse=False, _depth=None):
        drawn = torch.rand_like(x)
        if _reverse:
            drawn = self.cache[_depth]
        elif self.training:
            self.cache = {**self.cache, _depth: drawn}
        return self.fn(x * drawn)


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_a_cache_in_tied_weights(training):
    """What one depth caches is no edit of what another holds, over several steps."""
    f, g = Cached(), mlp()
    net = reformer.ReversibleSequence([(f, lambda x, **_: g(x))] * 3, send_signal=True).train(training)
    x = both_halves()
    wanted = [x, *f.parameters(), *g.parameters()]

    def hand():
        x1, x2 = x.chunk(2, 2)
        for _ in range(3):
            x1 = x1 + f.fn(x2 * torch.rand_like(x2))
            x2 = x2 + g(x1)
        return torch.cat((x1, x2), 2)

    for seed in range(3):
        assert_same(gradients(lambda: net(x), wanted, seed), gradients(hand, wanted, seed))


# -- blocks by themselves ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("module", "dim"), [(reformer, 2), (axial_attention, 1), (nuwa, 2)])
def test_a_block_by_itself(module, dim):
    """On a tensor that holds both halves; f and g may get different arguments of one name. Backward is autograd's."""
    f, g = (Look(0.25), Look(0.25)) if dim == 2 else (Turned(Look(0.25)), Turned(Look(0.25)))
    x = draw(2, 5, 2 * WIDTH) if dim == 2 else draw(2, 2 * WIDTH, 5)
    one, other = draw(2, 4, WIDTH), draw(2, 3, WIDTH)
    kinds = [module.ReversibleBlock(f, g)] + ([module.IrreversibleBlock(f, g)] if module is not nuwa else [])
    wanted = [x, one, other, *f.parameters(), *g.parameters()]

    def hand():
        x1, x2 = x.chunk(2, dim)
        x1 = x1 + f(x2, context=one)
        return torch.cat((x1, x2 + g(x1, context=other)), dim)

    true = gradients(hand, wanted)
    for block in kinds:
        assert_same(gradients(lambda: block(x, {"context": one}, {"context": other}), wanted), true)


def test_an_se3_block_by_itself():
    block = se3_transformer.ReversibleBlock(Each(Look), Each(Look))
    x, context = {"0": draw(2, 5, 2 * WIDTH), "1": draw(2, 3, 2, 2 * WIDTH)}, draw(2, 4, WIDTH)

    def hand():
        x1, x2 = ({key: t.chunk(2, -1)[i] for key, t in x.items()} for i in (0, 1))
        out = block.f.net(x2, context=context)
        x1 = {key: x1[key] + out[key] for key in x1}
        out = block.g.net(x1)
        return {key: torch.cat((x1[key], x2[key] + out[key]), -1) for key in x}

    wanted = [*x.values(), context, *block.parameters()]
    assert_same(gradients(lambda: block(x, context=context), wanted), gradients(hand, wanted))


@pytest.mark.parametrize("reverse", [True, False])
@pytest.mark.parametrize("kind", TYPES)
def test_a_dual_block_by_itself(kind, reverse):
    """What it returns, halved, is what the sequence of this one block returns."""
    it = a_dual(1, Look)
    block = nuwa_video_audio.BLOCKS[kind](*(Look() for _ in range(4)))
    it.net.blocks[0], it.net.block_types = block, [kind]

    def alone():
        out = block(*(torch.cat((t, t), 2) for t in it.inputs), **it.side, _reverse=reverse, strange=1)
        return [torch.stack(t.chunk(2, 2)).mean(0) for t in out]

    assert_same(gradients(alone, it.wanted), gradients(it.hand, it.wanted))
    assert_same(gradients(it, it.wanted), gradients(it.hand, it.wanted))


def test_blocks_by_themselves_share_no_signals():
    """The originals write them into default arguments that all blocks share."""
    log = []
    first = reformer.ReversibleBlock(Told(log, "f"), Told(log, "g"), depth=3, send_signal=True)
    other = reformer.ReversibleBlock(Told(log, "f"), Told(log, "g"))
    x, args = both_halves(), {}
    loss = loss_of(first(x, args))
    other(x)
    loss.backward()
    none = [("f", None, None), ("g", None, None)]
    assert log == [("f", False, 3), ("g", False, 3), *none, ("g", True, 3), ("f", True, 3)]
    assert args == {}


def test_irreversible_blocks_store():
    log = []
    block = reformer.IrreversibleBlock(Told(log, "f"), Told(log, "g"))
    loss_of(block(both_halves(), {}, {})).backward()
    assert [name for name, *_ in log] == ["f", "g"]


def test_deterministic_takes_the_arguments_of_the_original():
    for module in (reformer, axial_attention, se3_transformer, nuwa, nuwa_video_audio):
        fn = module.Deterministic(mlp())
        x = draw()
        assert torch.equal(fn(x, record_rng=True), fn.net(x))
        assert torch.equal(fn(x, set_rng=True), fn.net(x))


def test_dual_without_reversal():
    """`reverse=False` stores, and says the same."""
    it = build("nuwa_video_audio")
    again = []
    it.net.blocks[0].f.net.register_forward_hook(lambda *_: again.append(rg.replaying()))
    true = gradients(it, it.wanted)
    assert again == [False, True]
    it.side["reverse"] = False
    assert_same(gradients(it, it.wanted), true)
    assert again == [False, True, False]


def test_dual_without_context_where_no_block_needs_it():
    it = a_dual(2, Look)
    net = nuwa_video_audio.DualModalityReversibleSequence([[Look() for _ in range(4)] for _ in range(2)], [SELF, INTER])
    assert [t.shape for t in net(*it.inputs)] == [t.shape for t in it.inputs]


def test_sequential_sequence():
    """x = attn(x, **kwargs), x = ff(x); the list that it is given is the list that it keeps."""
    blocks = nn.ModuleList([nn.ModuleList([Each(Look), Each(Look)]) for _ in range(2)])
    net = se3_transformer.SequentialSequence(blocks)
    x, context = {"0": draw(2, 5, WIDTH), "1": draw(2, 3, WIDTH)}, draw(2, 4, WIDTH)
    out = net(x, context=context)
    for attn, ff in blocks:
        x = ff(attn(x, context=context))
    assert out.keys() == x.keys() == {"0", "1", "extra"}
    assert all(torch.equal(out[key], x[key]) for key in x)
    assert net.blocks is blocks
    assert list(se3_transformer.SequentialSequence([(mlp(), mlp())]).state_dict()) == []


def test_route_args():
    """For each depth what f gets and what g gets; names that are not routed are dropped."""
    route = {"a": [(True, False), (False, True)], "b": [(True, True), (False, False)], "c": [(True, True)] * 2}
    assert nuwa.route_args(route, {"a": 1, "b": None, "d": 3}, 2) == [({"a": 1, "b": None}, {"b": None}), ({}, {"a": 1})]


def test_the_route_may_be_exchanged():
    it = build("nuwa")
    first = it()
    it.net.args_route = {}
    assert it.net.args_route == {}
    assert not torch.allclose(it(), first)
    with pytest.raises(rg.ProgramError, match="3 blocks"):
        it.net.args_route = {"mask": []}


# -- keys of the state dict --------------------------------------------------------------------------------------------


def linear():
    return nn.Linear(2, 2, bias=False)


def pairs_of(make, depth=2):
    return nn.ModuleList([nn.ModuleList([make(), make()]) for _ in range(depth)])


PAIR_KEYS = ["blocks.0.f.net.weight", "blocks.0.g.net.weight", "blocks.1.f.net.weight", "blocks.1.g.net.weight"]
KEYS = {
    "reformer": (
        lambda: reformer.ReversibleSequence(pairs_of(linear)),
        [*PAIR_KEYS, "irrev_blocks.0.f.weight", "irrev_blocks.0.g.weight", "irrev_blocks.1.f.weight", "irrev_blocks.1.g.weight"],
    ),
    "reformer with signals": (
        lambda: reformer.ReversibleSequence(pairs_of(linear, 1), send_signal=True),
        [*PAIR_KEYS[:2], "irrev_blocks.0.f.weight", "irrev_blocks.0.g.weight"],
    ),
    "axial_attention": (lambda: axial_attention.ReversibleSequence(pairs_of(linear)), PAIR_KEYS),
    "se3_transformer": (lambda: se3_transformer.ReversibleSequence(pairs_of(linear)), PAIR_KEYS),
    "se3_transformer, sequential": (
        lambda: se3_transformer.SequentialSequence(pairs_of(linear)),
        ["blocks.0.0.weight", "blocks.0.1.weight", "blocks.1.0.weight", "blocks.1.1.weight"],
    ),
    "nuwa": (lambda: nuwa.ReversibleSequence(pairs_of(linear)), PAIR_KEYS),
    "nuwa_video_audio": (
        lambda: nuwa_video_audio.DualModalityReversibleSequence([[linear() for _ in range(4)]], [INTER]),
        ["blocks.0.f.net.weight", "blocks.0.g.net.weight", "blocks.0.j.net.weight", "blocks.0.k.net.weight"],
    ),
}


@pytest.mark.parametrize("case", KEYS)
def test_keys_of_the_state_dict(case):
    make, keys = KEYS[case]
    net = make()
    assert list(net.state_dict()) == keys
    make().load_state_dict(net.state_dict(), strict=True)


def test_the_second_set_of_reformer_names_the_same_tensors():
    net = reformer.ReversibleSequence(pairs_of(linear))
    state = net.state_dict()
    for key in PAIR_KEYS:
        assert state[key].data_ptr() == state["irrev_" + key.replace(".net", "")].data_ptr()
    assert len(list(net.parameters())) == 4


# -- bad input ---------------------------------------------------------------------------------------------------------

f, X = mlp(), torch.rand(2, 5, WIDTH, dtype=torch.float64)
Dual = nuwa_video_audio.DualModalityReversibleSequence


def dual(*types):
    return Dual([(Look(), Look(), Look(), Look())] * len(types), types)


def missing_key(x):
    return {"a": x["a"]}


TYPES_LISTED = ["intra_modality_self_attn", "intra_modality_cross_attn", "inter_modality_cross_attn"]
BAD = {
    "unknown block type": (lambda: dual(SELF, "self_attn"), ["unknown block type 'self_attn'", *TYPES_LISTED]),
    "more blocks than types": (lambda: Dual([(f, f, f, f)] * 2, [SELF]), ["got 2 blocks and 1 types"]),
    "more types than blocks": (lambda: Dual([(f, f, f, f)], [SELF] * 3), ["got 1 blocks and 3 types"]),
    "two functions of four": (lambda: Dual([(f, f)], [SELF]), ["block 0 is a tuple of 2, not 4 callables (f, g, j, k)"]),
    "three functions, reformer": (
        lambda: reformer.ReversibleSequence([(f, f), (f, f, f)]),
        ["block 1 is a tuple of 3, not 2 callables (f, g)"],
    ),
    "one function, axial": (lambda: axial_attention.ReversibleSequence([[f]]), ["block 0 is a list of 1", "(f, g)"]),
    "no list of functions, nuwa": (lambda: nuwa.ReversibleSequence([torch.sin]), ["block 0", "not 2 callables (f, g)"]),
    "three functions, se3": (lambda: se3_transformer.ReversibleSequence([nn.ModuleList([f] * 3)]), ["ModuleList of 3"]),
    "three functions, sequential": (lambda: se3_transformer.SequentialSequence([(f, f, f)]), ["block 0", "(attn, ff)"]),
    "no function": (lambda: nuwa.ReversibleSequence([(f, None)]), ["block 0", "not 2 callables (f, g)"]),
    "no blocks": (lambda: reformer.ReversibleSequence([]), ["no blocks"]),
    "route too short": (
        lambda: nuwa.ReversibleSequence([(f, f)] * 2, {"mask": [(True, False)]}),
        ["route['mask']", "each of 2 blocks, got 1"],
    ),
    "route too long": (
        lambda: nuwa.ReversibleSequence([(f, f)] * 2, {"mask": [(True, False)] * 3}),
        ["route['mask']", "each of 2 blocks, got 3"],
    ),
    "route of numbers": (
        lambda: nuwa.ReversibleSequence([(f, f)], {"mask": [(1, 0)]}),
        ["route['mask'][0] must be a pair of bools (to_f, to_g), got (1, 0)"],
    ),
    "route_args too short": (lambda: nuwa.route_args({"mask": [(True, True)]}, {"mask": 1}, 2), ["route['mask']", "got 1"]),
    "arg_route, reformer": (
        lambda: reformer.ReversibleSequence([(f, f)])(torch.cat((X, X), 2), arg_route=(True,)),
        ["arg_route must be a pair of bools (to_f, to_g), got (True,)"],
    ),
    "arg_route, axial": (
        lambda: axial_attention.ReversibleSequence([(f, f)])(X, arg_route=True),
        ["arg_route must be a pair of bools (to_f, to_g), got True"],
    ),
    "odd width": (
        lambda: reformer.ReversibleSequence([(f, f)])(X[..., :5]),
        ["odd size 5 along dim 2", "(2, 5, 5)", "both halves: torch.cat((x, x), dim)"],
    ),
    "odd width of a block": (
        lambda: axial_attention.ReversibleBlock(f, f)(X[:, :3]),
        ["odd size 3 along dim 1", "both halves"],
    ),
    "no width": (lambda: reformer.ReversibleSequence([(f, f)])(X[0]), ["a dim 2", "(5, 6)"]),
    "threshold": (lambda: reformer.ReversibleSequence([(f, f)], reverse_thres=-1), ["length must be a whole number"]),
    "video and audio of other batches": (
        lambda: dual(SELF)(X, X[:1], context=X),
        ["video and audio", "with the same batch and width", "(2, 5, 6) and (1, 5, 6)"],
    ),
    "video and audio of other widths": (
        lambda: dual(SELF)(X, X[..., :4], context=X),
        ["with the same batch", "(2, 5, 6) and (2, 5, 4)"],
    ),
    "video of other dims": (lambda: dual(SELF)(X[0], X[0], context=X), ["must be (batch, length, width)", "(5, 6)"]),
    "no context": (lambda: dual(SELF, CROSS)(X, X), ["block 1, a ReversibleCrossAttnBlock, needs a context", "Pass context="]),
    "context is None": (lambda: dual(CROSS)(X, X, context=None), ["block 0, a ReversibleCrossAttnBlock, needs a context"]),
    "a key that fn does not return": (
        lambda: se3_transformer.ReversibleSequence([(missing_key, missing_key)])({"a": X, "b": X}),
        ["update 0: x1 += missing_key(x2)", "fn returned the keys ['a'], the stream has ['a', 'b']"],
    ),
    "a tensor in place of a dict": (
        lambda: se3_transformer.ReversibleSequence([(lambda x: x["a"], f)])({"a": X}),
        ["update 0: x1 += <lambda>(x2)", "fn returned"],
    ),
    "memory": (lambda: nuwa.ReversibleSequence([(f, f)], memory="reversed"), ["unknown memory policy 'reversed'"]),
    "arithmetic": (lambda: Dual([(f, f, f, f)], [SELF], arithmetic="fixed"), ["unknown arithmetic 'fixed'"]),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input(case):
    act, words = BAD[case]
    with pytest.raises(rg.ProgramError) as info:
        act()
    assert isinstance(info.value, ValueError)
    for word in words:
        assert word in str(info.value), f"{word!r} is missing in {str(info.value)!r}"


def test_an_argument_that_fn_does_not_know():
    """As in the originals: reformer and axial pass what they are given, nuwa drops what has no route."""
    with pytest.raises(TypeError, match="unexpected keyword argument 'strange'"):
        reformer.ReversibleSequence([(f, f)])(torch.cat((X, X), 2), strange=1)
    with pytest.raises(TypeError, match="unexpected keyword argument 'strange'"):
        axial_attention.ReversibleSequence([(f, f)])(X, strange=1)
    with pytest.raises(TypeError, match="unexpected keyword argument 'strange'"):
        dual(SELF)(X, X, strange=1)
    net = nuwa.ReversibleSequence([(f, f)])
    assert torch.equal(net(X, strange=1), net(X))


def test_deterministic_by_itself():
    """`record_rng`, then `set_rng`: the same numbers, and the generator is where it was."""
    fn, x = reformer.Deterministic(nn.Dropout(0.5)), torch.ones(64)
    with pytest.raises(rg.ProgramError, match="Dropout was never called with record_rng"):
        fn(x, set_rng=True)
    first = fn(x, record_rng=True)
    state = torch.get_rng_state()
    assert not torch.equal(fn(x), first)
    torch.set_rng_state(state)
    assert torch.equal(fn(x, set_rng=True), first)
    assert torch.equal(torch.get_rng_state(), state)
