"""`retrograde.compat.reformer` beside reformer-pytorch."""

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

pytestmark = MARKS
REFORMER = SYSTEMS["reformer"]
ROUTES = [(True, False), (False, True), (True, True), (False, False)]


class Told(nn.Module):
    """A branch that writes down the signals it gets."""

    heard: list = []

    def __init__(self):
        super().__init__()
        self.fn = mlp(dropout=0.2)

    def forward(self, x, **signals):
        Told.heard.append(signals)
        return self.fn(x)


@pytest.mark.parametrize("dropout", DROPOUTS)
@pytest.mark.parametrize("depth", DEPTHS)
def test_outputs_and_gradients(depth, dropout):
    compare(REFORMER, REFORMER.blocks(depth, partial(mlp, dropout=dropout)))


@pytest.mark.parametrize("dropout", DROPOUTS)
@pytest.mark.parametrize("route", ROUTES)
def test_side_inputs_and_their_gradients(route, dropout):
    compare(REFORMER, REFORMER.blocks(3, partial(Mixed, dropout)), arg_route=route, context=draw(3, 4, WIDTH))


@pytest.mark.parametrize("threshold", [4, 5, 6])
def test_reverse_thres(threshold):
    compare(REFORMER, REFORMER.blocks(3, partial(mlp, dropout=0.3)), {"reverse_thres": threshold})


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("rate", [0.5, 0.97])
def test_layer_dropout_drops_the_same_blocks(rate, seed):
    compare(REFORMER, REFORMER.blocks(5, partial(mlp, dropout=0.3)), {"layer_dropout": rate}, seed=seed)


@pytest.mark.parametrize("options", [{}, {"reverse_thres": 5}, {"layer_dropout": 0.5}])
def test_signals(options):
    blocks, inputs, heard = REFORMER.blocks(3, Told), REFORMER.inputs(), {}
    for kind in KINDS:
        call, own = REFORMER.build(kind, blocks, send_signal=True, **options)
        Told.heard = heard[kind] = []
        measure(call, own, inputs)
    assert heard["ours"] == heard["original"]
    assert any(heard["original"]) == ("reverse_thres" not in options)


@pytest.mark.parametrize("options", [{}, {"layer_dropout": 0.5}, {"reverse_thres": 5}, {"send_signal": True}])
def test_without_grad_and_in_eval(options):
    blocks, inputs, outs = REFORMER.blocks(3, Told), REFORMER.inputs(), {}
    for kind in KINDS:
        call, _ = REFORMER.build(kind, blocks, **options)
        for mode in (True, False):
            torch.manual_seed(0)
            with torch.no_grad():
                outs[kind, mode] = call.train(mode)(*inputs)
    for mode in (True, False):
        assert_same([outs["ours", mode]], [outs["original", mode]], 1e-12)


@pytest.mark.parametrize("depth", DEPTHS)
def test_state_dict(depth):
    assert_same_keys(*(REFORMER.make(kind, REFORMER.blocks(depth)) for kind in KINDS))


@pytest.mark.parametrize("name", ["ReversibleBlock", "IrreversibleBlock"])
def test_blocks_by_themselves(name):
    context = {"context": draw(3, 4, WIDTH)}
    compare_blocks(REFORMER, name, [Mixed(0.2), Mixed(0.2)], REFORMER.inputs(), f_args=context, g_args={})


# -- the package's own model -------------------------------------------------------------------------------------------

LM = {
    "num_tokens": 20, "dim": 16, "depth": 3, "max_seq_len": 32, "heads": 2, "dim_head": 8, "bucket_size": 4, "n_hashes": 2,
    "ff_chunks": 2, "causal": True, "lsh_dropout": 0.1, "ff_dropout": 0.1,
}  # fmt: skip
VARIANTS = {
    "plain": {},
    "post attention dropout": {"post_attn_dropout": 0.1, "random_rotations_per_head": True},
    "tied weights": {"weight_tie": True},
    "layer dropout": {"layer_dropout": 0.5},
    "ordinary autograd": {"reverse_thres": 32},
    "full attention": {"use_full_attn": True},
    "chunks of heads, memory": {"attn_chunks": 2, "num_mem_kv": 8},
    "local attention, axial positions": {"n_local_attn_heads": 1, "axial_position_emb": True, "axial_position_shape": (8, 4)},
    "rezero, scale norm": {"use_scale_norm": True, "ff_glu": True},
    "product keys": {"pkm_layers": (2,), "pkm_num_keys": 32},
}


def language_models(**options):
    package = peer("reformer_pytorch.reformer_pytorch")
    return hosts(package, REFORMER, lambda: package.ReformerLM(**{**LM, **options}).double())


def tokens():
    return (torch.randint(0, 20, (2, 32)),)


@pytest.mark.parametrize("variant", VARIANTS)
def test_language_model(variant):
    original, ours = language_models(**VARIANTS[variant])
    if "attn_chunks" in VARIANTS[variant]:  # the original is right without reversal alone, as it caches the last chunk alone
        original.reformer.layers.reverse_thres = 32
    compare_hosts(original, ours, tokens())


def test_language_model_in_float32():
    compare_hosts(*(model.float() for model in language_models()), tokens(), tolerance=1e-4)


def test_language_model_with_a_mask():
    compare_hosts(*language_models(), tokens(), input_mask=torch.rand(2, 32) > 0.2)


def test_language_model_takes_its_buckets_from_the_cache():
    """Without them the second run would hash anew, from vectors that differ in the last bits."""
    package = peer("reformer_pytorch.reformer_pytorch")
    _, ours = language_models()
    fetched = []
    with pytest.MonkeyPatch.context() as patch:
        hash_vectors = package.LSHAttention.hash_vectors

        def watched(*args, key_namespace, fetch, set_cache):
            fetched.append((fetch, key_namespace, set_cache))
            return hash_vectors(*args, key_namespace=key_namespace, fetch=fetch, set_cache=set_cache)

        patch.setattr(package.LSHAttention, "hash_vectors", watched)
        measure(ours, ours, tokens())
    assert fetched == [(False, i, True) for i in range(3)] + [(True, i, True) for i in reversed(range(3))]


def test_language_model_trains_alike():
    original, ours = language_models(layer_dropout=0.3)
    inputs = tokens()
    assert_same(trained(ours, inputs), trained(original, inputs), 1e-8)


def test_language_model_in_eval():
    original, ours = (model.eval() for model in language_models())
    inputs, outs = tokens(), []
    for model in (ours, original):
        torch.manual_seed(0)
        with torch.no_grad():
            outs.append(model(*inputs))
    assert_same(outs[:1], outs[1:], 1e-12)


@pytest.mark.parametrize("variant", VARIANTS)
def test_state_dict_of_the_language_model(variant):
    assert_same_keys(*language_models(**VARIANTS[variant]))
