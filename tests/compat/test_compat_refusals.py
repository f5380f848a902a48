"""Drop-ins refuse bad input with a message."""

import pytest
import torch
from compat_support import CROSS, SELF, Look, X, f
from support import rg
from torch import nn

from retrograde.compat import axial_attention, nuwa, nuwa_video_audio, reformer, se3_transformer

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
