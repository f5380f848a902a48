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
from .training import assert_trains

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


# -- the README's examples ---------------------------------------------------------------------------------------------

FRAMES, SIZE = 3, 32
DECODER = {
    "dim": 32, "max_video_frames": FRAMES, "dec_depth": 4, "dec_heads": 8, "dec_reversible": True, "enc_reversible": True,
    "attn_dropout": 0.05, "ff_dropout": 0.05, "sparse_3dna_kernel_size": (5, 3, 3), "sparse_3dna_dilation": (1, 2, 4),
    "shift_video_tokens": True,
}  # fmt: skip
TEXT = {"text_num_tokens": 50, "text_enc_depth": 2, "text_enc_heads": 8, "text_max_seq_len": 12}
SKETCH = {
    "image_size": SIZE, "sketch_enc_depth": 2, "sketch_enc_heads": 8, "sketch_max_video_frames": 2,
    "sketch_enc_use_sparse_3dna": True, "cross_2dna_kernel_size": 5, "cross_2dna_dilation": 1,
}  # fmt: skip


def vae(**options):
    """Without the parts that train it, which need the weights of a VGG from the net."""
    package = peer("nuwa_pytorch.vqgan_vae")
    small = {"dim": 16, "num_layers": 4, "image_size": SIZE, "num_conv_blocks": 2, "vq_codebook_size": 16}
    return package.VQGanVAE(**{**small, "use_vgg_and_gan": False, **options})


def dropped_conditions(patch):
    """Which conditions the models drop (20 % by default): they edit the mask of the text after the encoder has run with it."""
    package, found = peer("nuwa_pytorch.nuwa_pytorch"), []
    draw_mask = package.prob_mask_like

    def watched(*args, **options):
        found.append(draw_mask(*args, **options))
        return found[-1]

    patch.setattr(package, "prob_mask_like", watched)
    return found


def test_nuwa_of_the_readme(monkeypatch):
    """The package refuses the README's `image_size` beside a VAE; softmax is in float32, whatever the model is in."""
    package, dropped = peer("nuwa_pytorch.nuwa_pytorch"), dropped_conditions(monkeypatch)
    models = hosts(package, NUWA, lambda: package.NUWA(vae=vae(), **DECODER, **TEXT))

    def loss_of_step(model, batch=4):
        text, video = torch.randint(0, 50, (batch, 12)), torch.randn(batch, FRAMES, 3, SIZE, SIZE)
        return model(text=text, video=video, return_loss=True)

    assert_trains(*models, [loss_of_step] * 3, 1e-4)
    assert any(mask.any() and not mask.all() for mask in dropped)


def test_nuwa_sketch_of_the_readme(monkeypatch):
    package, dropped = peer("nuwa_pytorch.nuwa_pytorch"), dropped_conditions(monkeypatch)
    make = partial(package.NUWASketch, **DECODER, **SKETCH)
    models = hosts(package, NUWA, lambda: make(vae=vae(), sketch_vae=vae(dim=32, channels=5)))

    def loss_of_step(model):
        sketch, video = torch.randn(2, 2, 5, SIZE, SIZE), torch.randn(2, FRAMES, 3, SIZE, SIZE)
        return model(sketch=sketch, sketch_mask=torch.ones(2, 2).bool(), video=video, return_loss=True)

    assert_trains(*models, [loss_of_step] * 3, 1e-4)
    assert any(mask.any() for mask in dropped)
