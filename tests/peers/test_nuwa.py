"""`retrograde.compat.nuwa` beside nuwa-pytorch."""

from functools import partial

import pytest
import torch
from support import WIDTH, assert_same, draw, mlp

from .systems import (
    DEPTHS,
    DROPOUTS,
    KINDS,
    MARKS,
    SYSTEMS,
    Mixed,
    assert_same_keys,
    compare,
    compare_blocks,
    compare_hosts,
    hosts,
    peer,
    trained,
)

pytestmark = MARKS
NUWA = SYSTEMS["nuwa"]
ROUTES = {
    "f": ((True, False),) * 3,
    "g": ((False, True),) * 3,
    "both": ((True, True),) * 3,
    "some": ((False, False), (True, False), (True, True)),
    "none": ((False, False),) * 3,
}


def masks(*lengths):
    """One of tokens to look at, for each length."""
    return [torch.rand(3, n) > 0.3 for n in lengths]


@pytest.mark.parametrize("dropout", DROPOUTS)
@pytest.mark.parametrize("depth", DEPTHS)
def test_outputs_and_gradients(depth, dropout):
    compare(NUWA, NUWA.blocks(depth, partial(mlp, dropout=dropout)))


@pytest.mark.parametrize("dropout", DROPOUTS)
@pytest.mark.parametrize("route", ROUTES)
def test_side_inputs_and_their_gradients(route, dropout):
    mask, context_mask = masks(5, 4)
    options = {"args_route": {"context": ROUTES[route], "context_mask": ROUTES[route], "mask": ROUTES["some"]}}
    blocks = NUWA.blocks(3, partial(Mixed, dropout))
    compare(NUWA, blocks, options, context=draw(3, 4, WIDTH), context_mask=context_mask, mask=mask)


def test_a_name_without_a_route_is_dropped():
    compare(NUWA, NUWA.blocks(3, Mixed), {"args_route": {"mask": ROUTES["f"]}}, context=draw(3, 4, WIDTH), mask=masks(5)[0])


def test_route_args():
    router, args = {"a": ROUTES["some"], "b": ROUTES["g"]}, {"a": 1, "b": 2, "c": 3}
    original, ours = (NUWA.module(kind).route_args(router, args, 3) for kind in KINDS)
    assert [tuple(pair) for pair in ours] == [tuple(pair) for pair in original]


@pytest.mark.parametrize("depth", DEPTHS)
def test_state_dict(depth):
    assert_same_keys(*(NUWA.make(kind, NUWA.blocks(depth)) for kind in KINDS))


def test_block_by_itself():
    context = {"context": draw(3, 4, WIDTH)}
    compare_blocks(NUWA, "ReversibleBlock", [Mixed(0.2), Mixed(0.2)], (draw(3, 5, 2 * WIDTH),), f_args=context, g_args=context)


# -- the package's own model -------------------------------------------------------------------------------------------

SMALL = {"dim": 16, "depth": 2, "heads": 2, "dim_head": 8, "cross_attend": True, "attn_dropout": 0.1, "ff_dropout": 0.1}
VARIANTS = {
    "plain": {},
    "causal, feedforward in chunks": {"causal": True, "ff_chunk_size": 3},
    "no cross attention": {"cross_attend": False},
    "video": {"sparse_3dna_attn": True, "sparse_3dna_video_shape": (2, 2, 2), "causal": True, "shift_video_tokens": True},
}


def transformers(**options):
    package = peer("nuwa_pytorch.nuwa_pytorch")
    return hosts(package, NUWA, lambda: package.ReversibleTransformer(**{**SMALL, **options}))


def text():
    """Tokens and what the model is given beside them."""
    mask, context_mask = masks(9, 4)
    return (torch.randn(3, 9, 16),), {"context": torch.randn(3, 4, 16), "mask": mask, "context_mask": context_mask}


@pytest.mark.parametrize("variant", VARIANTS)
def test_transformer(variant):
    inputs, side = text()
    if variant == "no cross attention":
        side = {"mask": side["mask"]}
    compare_hosts(*transformers(**VARIANTS[variant]), inputs, tolerance=2e-4, **side)


def test_transformer_trains_alike():
    original, ours = transformers()
    inputs, side = text()
    inputs = tuple(t.requires_grad_() for t in inputs)
    assert_same(trained(ours, inputs, **side), trained(original, inputs, **side), 1e-3)


@pytest.mark.parametrize("variant", VARIANTS)
def test_state_dict_of_the_transformer(variant):
    assert_same_keys(*transformers(**VARIANTS[variant]))
