"""`retrograde.compat.nuwa_video_audio` beside nuwa-pytorch."""

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
from .test_nuwa import DECODER, FRAMES, SIZE, TEXT, dropped_conditions, vae
from .training import assert_trains

pytestmark = MARKS
DUAL = SYSTEMS["nuwa_video_audio"]
TYPES = ["intra_modality_self_attn", "intra_modality_cross_attn", "inter_modality_cross_attn"]
BLOCKS = {
    "intra_modality_self_attn": "ReversibleSelfAttnBlock",
    "intra_modality_cross_attn": "ReversibleCrossAttnBlock",
    "inter_modality_cross_attn": "ReversibleCrossModalityAttnBlock",
}


def given(width=WIDTH, video=5, audio=4, text=3, dtype=torch.float64):
    """A context, and masks for all three."""
    masks = {name: torch.rand(3, n) > 0.3 for name, n in (("video_mask", video), ("audio_mask", audio), ("context_mask", text))}
    return {"context": draw(3, text, width).to(dtype), **masks}


@pytest.mark.parametrize("dropout", DROPOUTS)
@pytest.mark.parametrize("depth", DEPTHS)
def test_outputs_and_gradients(depth, dropout):
    compare(DUAL, DUAL.blocks(depth, partial(Mixed, dropout)), {"types": (TYPES * 4)[:depth]}, **given())


@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("reverse", [True, False])
@pytest.mark.parametrize("kind", TYPES)
def test_each_type_of_block(kind, reverse, masked):
    side = given() if masked else {"context": given()["context"]}
    compare(DUAL, DUAL.blocks(2, partial(Mixed, 0.3)), {"types": [kind] * 2}, reverse=reverse, **side)


@pytest.mark.parametrize("depth", DEPTHS)
def test_state_dict(depth):
    types = (TYPES * 4)[:depth]
    assert_same_keys(*(DUAL.make(kind, DUAL.blocks(depth), types=types) for kind in KINDS))


@pytest.mark.parametrize("kind", TYPES)
def test_blocks_by_themselves(kind):
    inputs = draw(3, 5, 2 * WIDTH), draw(3, 4, 2 * WIDTH)
    compare_blocks(DUAL, BLOCKS[kind], [Mixed(0.2) for _ in range(4)], inputs, **given())


def test_an_unknown_type_is_a_value_error():
    for kind in KINDS:
        with pytest.raises(ValueError, match="nonsense"):
            DUAL.make(kind, DUAL.blocks(1, mlp), types=["nonsense"])


# -- the package's own model -------------------------------------------------------------------------------------------

SMALL = {
    "dim": 16, "depth": 2, "heads": 2, "dim_head": 8, "num_audio_tokens_per_video_frame": 2, "num_video_tokens_per_frame": 4,
    "sparse_3dna_video_shape": (2, 2, 2), "cross_modality_attn_every": 1, "attn_dropout": 0.1, "ff_dropout": 0.1,
    "sparse_2dna_kernel_size": 3,
}  # fmt: skip
VARIANTS = {
    "plain": {},
    "shifted tokens": {"shift_video_tokens": True, "shift_audio_tokens": True},
    "relative positions, chunks": {"sparse_2dna_rel_pos_bias": True, "ff_chunk_size": 3},
    "cross attention in the last layer": {"depth": 3, "cross_modality_attn_every": 3},
}


def decoders(**options):
    package = peer("nuwa_pytorch.nuwa_pytorch")
    return hosts(package, DUAL, lambda: package.ReversibleDualModalityDecoder(**{**SMALL, **options}))


def film():
    return torch.randn(3, 9, 16), torch.randn(3, 5, 16)


@pytest.mark.parametrize("variant", VARIANTS)
def test_decoder(variant):
    side = given(16, video=9, audio=5, dtype=torch.float32)
    compare_hosts(*decoders(**VARIANTS[variant]), film(), tolerance=2e-4, **side)


def test_decoder_trains_alike():
    original, ours = decoders()
    inputs, side = [t.requires_grad_() for t in film()], given(16, video=9, audio=5, dtype=torch.float32)
    side["context"] = side["context"].detach()
    assert_same(trained(ours, inputs, **side), trained(original, inputs, **side), 1e-3)


@pytest.mark.parametrize("variant", VARIANTS)
def test_state_dict_of_the_decoder(variant):
    assert_same_keys(*decoders(**VARIANTS[variant]))


# -- the README's example ----------------------------------------------------------------------------------------------

AUDIO = {"num_audio_tokens": 40, "num_audio_tokens_per_video_frame": 4, "cross_modality_attn_every": 3, "image_size": SIZE}


def test_nuwa_video_audio_of_the_readme(monkeypatch):
    """One film at a time: with more, the package fails on its default `sparse_3dna_rel_pos_bias`."""
    package, dropped = peer("nuwa_pytorch.nuwa_pytorch"), dropped_conditions(monkeypatch)
    make = partial(package.NUWAVideoAudio, **AUDIO, **DECODER, **{**TEXT, "text_enc_depth": 1})
    models = hosts(package, (SYSTEMS["nuwa"], DUAL), lambda: make(vae=vae()))

    def loss_of_step(model):
        text, audio = torch.randint(0, 50, (1, 12)), torch.randint(0, 40, (1, 4 * FRAMES))
        return model(text=text, audio=audio, video=torch.randn(1, FRAMES, 3, SIZE, SIZE), return_loss=True)

    assert_trains(*models, [loss_of_step] * 6, 1e-4)
    assert any(mask.any() for mask in dropped)
    assert not all(mask.any() for mask in dropped)
