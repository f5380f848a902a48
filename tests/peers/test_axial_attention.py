"""`retrograde.compat.axial_attention` beside axial-attention."""

from functools import partial

import pytest
import torch
from support import WIDTH, assert_same, draw, loss_of, mlp
from torch import nn

from .systems import (
    DEPTHS,
    DROPOUTS,
    KINDS,
    MARKS,
    SYSTEMS,
    ChannelsFirst,
    Mixed,
    assert_same_keys,
    compare,
    compare_blocks,
    compare_hosts,
    hosts,
    measure,
    peer,
    trained,
)
from .training import assert_trains

pytestmark = MARKS
AXIAL = SYSTEMS["axial_attention"]


@pytest.mark.parametrize("dropout", DROPOUTS)
@pytest.mark.parametrize("depth", DEPTHS)
def test_outputs_and_gradients(depth, dropout):
    compare(AXIAL, AXIAL.blocks(depth, partial(mlp, dropout=dropout)))


@pytest.mark.parametrize("dropout", DROPOUTS)
@pytest.mark.parametrize("route", [{}, {"arg_route": (True, False)}, {"arg_route": (False, True)}, {"arg_route": (False, False)}])
def test_side_inputs_and_their_gradients(route, dropout):
    compare(AXIAL, AXIAL.blocks(3, partial(Mixed, dropout)), context=draw(3, 4, WIDTH), **route)


@pytest.mark.parametrize("shape", [(2, 6, 3, 4), (2, 6, 2, 3, 2)])
def test_images_and_volumes(shape):
    inputs = (draw(*shape),)
    blocks = AXIAL.blocks(3, partial(mlp, dropout=0.3))
    found = [measure(*AXIAL.build(kind, blocks), inputs) for kind in KINDS]
    assert found[0].keys() == found[1].keys()
    assert_same(found[1].values(), found[0].values())


@pytest.mark.parametrize("depth", DEPTHS)
def test_state_dict(depth):
    assert_same_keys(*(AXIAL.make(kind, AXIAL.blocks(depth)) for kind in KINDS))


@pytest.mark.parametrize("name", ["ReversibleBlock", "IrreversibleBlock"])
def test_blocks_by_themselves(name):
    fns = [ChannelsFirst(Mixed(0.2)), ChannelsFirst(Mixed(0.2))]
    compare_blocks(AXIAL, name, fns, (draw(3, 2 * WIDTH, 5),), f_args={}, g_args={"context": draw(3, 4, WIDTH)})


# -- the package's own model -------------------------------------------------------------------------------------------


def image_models(depth=2, **options):
    package = peer("axial_attention.axial_attention")
    options = {"dim": 8, "depth": depth, "heads": 2, **options}
    return hosts(package, AXIAL, lambda: package.AxialImageTransformer(**options).double())


def images(grad=True):
    return (draw(2, 8, 4, 3, grad=grad),)


@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("options", [{}, {"axial_pos_emb_shape": (4, 3)}])
def test_image_model(depth, options):
    compare_hosts(*image_models(depth, **options), images())


def test_image_model_in_float32():
    inputs = tuple(t.detach().float() for t in images())
    compare_hosts(*(model.float() for model in image_models()), inputs, tolerance=1e-4)


def test_image_model_trains_on_plain_images_with_ours_alone():
    original, ours = image_models()
    inputs = images(grad=False)
    assert not original(*inputs).requires_grad
    plain = measure(ours, ours, inputs, grad=False)
    wanted = measure(original, original, inputs)  # the same gradients as on images that require grad
    names = [name for name, _ in ours.named_parameters()]
    assert_same([plain[f"gradient of {name}"] for name in names], [wanted[f"gradient of {name}"] for name in names])
    assert all(moved.abs().max() > 0 for moved in trained(ours, inputs))


def test_image_model_trains_alike():
    original, ours = image_models()
    inputs = images()
    assert_same(trained(ours, inputs), trained(original, inputs), 1e-8)


def test_image_model_without_grad():
    original, ours = image_models()
    inputs = images()
    with torch.no_grad():
        assert_same([ours.eval()(*inputs)], [original.eval()(*inputs)], 1e-12)


def test_state_dict_of_the_image_model():
    assert_same_keys(*image_models(axial_pos_emb_shape=(4, 3)))


# -- the README's example ----------------------------------------------------------------------------------------------


def test_image_transformer_of_the_readme():
    """Behind a convolution of plain images, as there: without it the original would not train."""
    package = peer("axial_attention.axial_attention")

    def make():
        transformer = package.AxialImageTransformer(dim=16, depth=3, reversible=True)
        return nn.Sequential(nn.Conv2d(3, 16, 1), transformer).double()

    losses = [lambda model: loss_of(model(draw(2, 3, 5, 4, grad=False))) / 100] * 3
    assert_trains(*hosts(package, AXIAL, make), losses)
