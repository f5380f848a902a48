"""The examples of reformer-pytorch's README, trained with `retrograde.compat.reformer` and without."""

from functools import partial

import pytest
import torch
from support import assert_same, loss_of
from torch import nn

from .systems import MARKS, SYSTEMS, hosts, peer
from .training import assert_trains, stored

pytestmark = MARKS
REFORMER = SYSTEMS["reformer"]
TOKENS = 50
LM = {"num_tokens": TOKENS, "dim": 32, "depth": 3, "max_seq_len": 256}


def package():
    return peer("reformer_pytorch.reformer_pytorch")


def models(make):
    return hosts(package(), REFORMER, lambda: make().double())


def ids(*shape):
    return torch.randint(0, TOKENS, shape)


def mean_loss(out):
    return loss_of(out) / out.numel()


def floats(*shape, grad=False):
    return torch.randn(*shape, dtype=torch.float64, requires_grad=grad)


# -- models by themselves ----------------------------------------------------------------------------------------------

SIMPLE = {
    "num_tokens": TOKENS, "dim": 32, "depth": 7, "max_seq_len": 64, "heads": 8, "lsh_dropout": 0.1, "ff_dropout": 0.1,
    "post_attn_dropout": 0.1, "layer_dropout": 0.1, "causal": True, "bucket_size": 4, "n_hashes": 4, "emb_dim": 16, "dim_head": 8,
    "ff_chunks": 10, "attn_chunks": 8, "num_mem_kv": 8, "full_attn_thres": 16, "reverse_thres": 16, "use_scale_norm": False,
    "use_rezero": False, "one_value_head": False, "weight_tie": False, "weight_tie_embedding": False, "n_local_attn_heads": 2,
    "pkm_layers": (4, 7), "pkm_num_keys": 32, "use_full_attn": False,
}  # fmt: skip


def test_simple_language_model():
    """The original is wrong: `attn_chunks` has it fetch the buckets of the last chunk for all chunks."""
    losses = [lambda model: mean_loss(model(ids(1, 64)))] * 3
    assert_trains(*models(lambda: package().ReformerLM(**SIMPLE)), losses, wrong=True)


def test_simple_language_model_without_chunks():
    losses = [lambda model: mean_loss(model(ids(1, 64)))] * 3
    assert_trains(*models(lambda: package().ReformerLM(**{**SIMPLE, "attn_chunks": 1})), losses)


def test_stack():
    """On an input that requires grad; on that of the README, which does not, the original does not train."""
    original, ours = models(lambda: package().Reformer(dim=32, depth=3, heads=8, lsh_dropout=0.1, causal=True))
    assert not original(floats(1, 256, 32)).requires_grad
    assert_trains(original, ours, [lambda model: mean_loss(model(floats(1, 256, 32, grad=True)))] * 2)
    assert_trains(None, ours, [lambda model: mean_loss(model(floats(1, 256, 32)))] * 2)


def test_masks():
    def loss_of_step(model):
        masks = {"input_mask": torch.rand(1, 192) > 0.2, "context_mask": torch.rand(1, 64) > 0.2}
        return mean_loss(model(ids(1, 192), keys=floats(1, 64, 32), **masks))

    assert_trains(*models(lambda: package().ReformerLM(**{**LM, "depth": 1}, ff_chunks=8, causal=True)), [loss_of_step] * 3)


def test_axial_positions():
    """The original is wrong, for its chunks."""
    options = {"ff_chunks": 8, "attn_chunks": 2, "causal": True, "axial_position_emb": True, "axial_position_shape": (16, 16)}
    losses = [lambda model: mean_loss(model(ids(1, 256)))] * 3
    assert_trains(*models(lambda: package().ReformerLM(**LM, **options)), losses, wrong=True)


def test_feed_forward():
    options = {"ff_chunks": 8, "ff_dropout": 0.1, "ff_mult": 6, "ff_activation": nn.LeakyReLU, "ff_glu": True}
    losses = [lambda model: mean_loss(model(ids(1, 256)))] * 3
    assert_trains(*models(lambda: package().ReformerLM(**LM, **options)), losses)


# -- encoders and decoders ---------------------------------------------------------------------------------------------


class Translation(nn.Module):
    def __init__(self, encoder, decoder):
        super().__init__()
        self.encoder, self.decoder = encoder, decoder

    def forward(self, x, y):
        return self.decoder(y, keys=self.encoder(x))


def test_translation():
    options = {**LM, "heads": 8, "fixed_position_emb": True}

    def make():
        encoder = package().ReformerLM(**options, emb_dim=16, return_embeddings=True)
        return Translation(encoder, package().ReformerLM(**options, causal=True))

    assert_trains(*models(make), [lambda model: mean_loss(model(ids(1, 128), ids(1, 128)))] * 3)


def test_captions():
    def make():
        encoder = package().Reformer(dim=32, depth=2, heads=8)
        decoder = package().ReformerLM(**{**LM, "depth": 2}, heads=8, causal=True)
        return Translation(nn.Sequential(nn.Linear(32, 32), encoder), decoder)

    assert_trains(*models(make), [lambda model: mean_loss(model(floats(1, 128, 32), ids(1, 128)))] * 3)


def test_encoder_and_decoder():
    make = partial(
        peer("reformer_pytorch").ReformerEncDec,
        dim=32, enc_num_tokens=TOKENS, enc_depth=2, enc_max_seq_len=256, dec_num_tokens=TOKENS, dec_depth=2, dec_max_seq_len=256,
    )  # fmt: skip

    def loss_of_step(model):
        mask = torch.ones(1, 256).bool()
        return model(ids(1, 256), ids(1, 256), return_loss=True, enc_input_mask=mask)

    assert_trains(*models(make), [loss_of_step] * 3)


# -- wrappers ----------------------------------------------------------------------------------------------------------


def test_autopadder():
    options = {"heads": 8, "lsh_dropout": 0.1, "causal": True, "bucket_size": 63, "num_mem_kv": 77}
    wrapped = [peer("reformer_pytorch").Autopadder(model) for model in models(lambda: package().ReformerLM(**LM, **options))]
    assert_trains(*wrapped, [lambda model: mean_loss(model(ids(1, 201), keys=floats(1, 17, 32)))] * 3)


def test_training_wrapper():
    """With uneven sequences."""
    options = {"lsh_dropout": 0.1, "causal": True, "full_attn_thres": 32}
    wrapper = peer("reformer_pytorch.generative_tools").TrainingWrapper
    made = models(lambda: package().ReformerLM(**LM, **options))
    wrapped = [wrapper(model, ignore_index=0, pad_value=0) for model in made]
    assert_trains(*wrapped, [lambda model: model([ids(30), ids(63), ids(211)], return_loss=True)] * 3)


KINDS = {
    "Reformer": (
        lambda: package().Reformer(dim=32, depth=3, heads=8, lsh_dropout=0.1, causal=True),
        lambda: torch.randn(1, 128, 32, requires_grad=True),
    ),
    "ReformerLM": (lambda: package().ReformerLM(**LM, lsh_dropout=0.1, causal=True), lambda: ids(1, 128)),
}


@pytest.mark.parametrize("kind", KINDS)
def test_recorder(kind):
    """It has attention return its weights in the forward pass alone. In float32, as they are."""
    make, given = KINDS[kind]
    recorder = peer("reformer_pytorch").Recorder
    made = hosts(package(), REFORMER, make)
    wrapped = [recorder(model) for model in made]
    assert_trains(*wrapped, [lambda model: mean_loss(model(given()))] * 3, 1e-4)
    original, ours = (wrapper.recordings for wrapper in wrapped)
    assert list(ours) == list(original) == [0, 1, 2]
    for step in range(3):
        assert len(ours[step]) == len(original[step]) == 3
        for a, b in zip(ours[step], original[step], strict=True):
            assert_same([a["attn"]], [b["attn"]], 1e-3)
            assert torch.equal(a["buckets"], b["buckets"])
    model = wrapped[1]
    model.turn_off()
    model(given())
    assert 3 not in model.recordings
    model.turn_on()
    model.clear()
    assert model.eject() is made[1]
    assert_trains(*made, [lambda model: mean_loss(model(given()))] * 2, 1e-4)


def test_recorder_around_stored_activations():
    make, given = KINDS["ReformerLM"]
    _, ours = hosts(package(), REFORMER, make)
    model = peer("reformer_pytorch").Recorder(stored(ours))
    mean_loss(model(given())).backward()
    assert len(model.recordings[0]) == 3
