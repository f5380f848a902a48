"""Drop-ins: blocks by themselves, routes, keys of the state dict."""

import pytest
import torch
from compat_support import INTER, SELF, TYPES, Each, Look, Told, Turned, a_dual, both_halves, build
from support import WIDTH, assert_same, draw, gradients, loss_of, mlp, rg
from torch import nn

from retrograde.compat import axial_attention, nuwa, nuwa_video_audio, reformer, se3_transformer

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


def bare():
    return nn.Linear(2, 2, bias=False)


def pairs_of(make, depth=2):
    return nn.ModuleList([nn.ModuleList([make(), make()]) for _ in range(depth)])


PAIR_KEYS = ["blocks.0.f.net.weight", "blocks.0.g.net.weight", "blocks.1.f.net.weight", "blocks.1.g.net.weight"]
KEYS = {
    "reformer": (
        lambda: reformer.ReversibleSequence(pairs_of(bare)),
        [*PAIR_KEYS, "irrev_blocks.0.f.weight", "irrev_blocks.0.g.weight", "irrev_blocks.1.f.weight", "irrev_blocks.1.g.weight"],
    ),
    "reformer with signals": (
        lambda: reformer.ReversibleSequence(pairs_of(bare, 1), send_signal=True),
        [*PAIR_KEYS[:2], "irrev_blocks.0.f.weight", "irrev_blocks.0.g.weight"],
    ),
    "axial_attention": (lambda: axial_attention.ReversibleSequence(pairs_of(bare)), PAIR_KEYS),
    "se3_transformer": (lambda: se3_transformer.ReversibleSequence(pairs_of(bare)), PAIR_KEYS),
    "se3_transformer, sequential": (
        lambda: se3_transformer.SequentialSequence(pairs_of(bare)),
        ["blocks.0.0.weight", "blocks.0.1.weight", "blocks.1.0.weight", "blocks.1.1.weight"],
    ),
    "nuwa": (lambda: nuwa.ReversibleSequence(pairs_of(bare)), PAIR_KEYS),
    "nuwa_video_audio": (
        lambda: nuwa_video_audio.DualModalityReversibleSequence([[bare() for _ in range(4)]], [INTER]),
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
    net = reformer.ReversibleSequence(pairs_of(bare))
    state = net.state_dict()
    for key in PAIR_KEYS:
        assert state[key].data_ptr() == state["irrev_" + key.replace(".net", "")].data_ptr()
    assert len(list(net.parameters())) == 4
