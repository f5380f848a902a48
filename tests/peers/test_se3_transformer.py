"""`retrograde.compat.se3_transformer` beside se3-transformer-pytorch."""

from functools import partial

import pytest
import torch
from support import WIDTH, assert_same, draw, mlp
from torch import nn

from .systems import (
    DEPTHS,
    DROPOUTS,
    KINDS,
    MARKS,
    SYSTEMS,
    Keys,
    Mixed,
    assert_equal,
    assert_same_keys,
    compare,
    compare_blocks,
    compare_hosts,
    hosts,
    measure,
    peer,
    trained,
)

pytestmark = MARKS
SE3 = SYSTEMS["se3_transformer"]


class Swapped(nn.Module):
    """Returns the keys in another order, and one more than it was given."""

    def __init__(self, fn):
        super().__init__()
        self.fn = fn

    def forward(self, x, **side):
        out = self.fn(x, **side)
        return {"extra": out["0"], "1": out["1"], "0": out["0"]}


@pytest.mark.parametrize("dropout", DROPOUTS)
@pytest.mark.parametrize("depth", DEPTHS)
def test_outputs_and_gradients(depth, dropout):
    compare(SE3, SE3.blocks(depth, partial(mlp, dropout=dropout)))


@pytest.mark.parametrize("dropout", DROPOUTS)
def test_side_inputs_and_their_gradients(dropout):
    compare(SE3, SE3.blocks(3, partial(Mixed, dropout)), context=draw(3, 4, WIDTH))


def test_keys_in_another_order():
    blocks = nn.ModuleList(nn.ModuleList([Swapped(f), g]) for f, g in SE3.blocks(3))
    (x,) = SE3.inputs()
    call, own = SE3.build("by hand", blocks)
    true = measure(call, own, (x,))
    assert_equal(measure(*SE3.build("ours", blocks), (x,)), true)


@pytest.mark.parametrize("depth", DEPTHS)
def test_state_dict(depth):
    assert_same_keys(*(SE3.make(kind, SE3.blocks(depth)) for kind in KINDS))


@pytest.mark.parametrize("depth", DEPTHS)
def test_sequential(depth):
    blocks, inputs, context = SE3.blocks(depth, partial(Mixed, 0.3)), SE3.inputs(), draw(3, 4, WIDTH)
    nets = [SE3.module(kind).SequentialSequence(blocks) for kind in KINDS]
    assert_equal(*(measure(net, blocks, inputs, context=context) for net in reversed(nets)))
    assert_same_keys(*nets)
    assert list(nets[1].state_dict()) == [f"blocks.{key}" for key in blocks.state_dict()]


def test_block_by_itself():
    fns, x = [Keys(Mixed(0.2)), Keys(Mixed(0.2))], {"0": draw(3, 5, 8), "1": draw(3, 5, 4)}
    compare_blocks(SE3, "ReversibleBlock", fns, (x,), context=draw(3, 4, WIDTH))


# -- the package's own model -------------------------------------------------------------------------------------------

SMALL = {
    "dim": 4, "heads": 2, "dim_head": 4, "depth": 2, "num_degrees": 2, "num_neighbors": 3, "valid_radius": 10,
    "output_degrees": 2, "reversible": True,
}  # fmt: skip
VARIANTS = {
    "plain": {},
    "null keys": {"use_null_kv": True, "tie_key_values": True, "norm_gated_scale": True},
    "one-headed": {"one_headed_key_values": True, "attend_self": False},
    "edges": {"num_edge_tokens": 3, "edge_dim": 2},
    "rotary": {"rotary_position": True, "dim_head": 8},
    "first convolutions": {"num_conv_layers": 1, "fourier_encode_dist": True},
}


def point_models(**options):
    package = peer("se3_transformer_pytorch.se3_transformer_pytorch")
    return hosts(package, SE3, lambda: package.SE3Transformer(**{**SMALL, **options}))


def points():
    return torch.randn(1, 6, 4), torch.randn(1, 6, 3)


@pytest.mark.parametrize("variant", VARIANTS)
def test_point_model(variant):
    side = {"edges": torch.randint(0, 3, (1, 6, 6))} if variant == "edges" else {}
    compare_hosts(*point_models(**VARIANTS[variant]), points(), tolerance=2e-4, mask=torch.ones(1, 6).bool(), **side)


def test_point_model_in_double():
    features, places = (t.double() for t in points())
    compare_hosts(*(model.double() for model in point_models()), (features, places), tolerance=1e-9)


def test_point_model_trains_alike():
    original, ours = (model.double() for model in point_models())
    inputs = [t.double() for t in points()]
    assert_same(trained(ours, inputs, lr=1e-5), trained(original, inputs, lr=1e-5), 1e-6)


@pytest.mark.parametrize("reversible", [True, False])
def test_state_dict_of_the_point_model(reversible):
    package = peer("se3_transformer_pytorch.se3_transformer_pytorch")
    if reversible:
        assert_same_keys(*point_models())
        return
    original = package.SE3Transformer(**{**SMALL, "reversible": False})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(package, "SequentialSequence", SE3.module("ours").SequentialSequence)
        ours = package.SE3Transformer(**{**SMALL, "reversible": False})
    assert_same_keys(original, ours)
    compare_hosts(original, ours, points(), tolerance=0)
