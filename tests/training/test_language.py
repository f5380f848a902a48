"""The language model: its loss against torch's, its memory, its positions, and one stream beside two."""

import pytest
import torch
from support import rg
from torch.nn.functional import cross_entropy, linear

from retrograde.bench.meter import LiveBytes
from retrograde.models.language import Language, angles, rotated
from retrograde.models.loss import chunked_loss, language_loss


def batch(rows=2, length=17):
    tokens = torch.randint(256, (rows, length))
    return tokens[:, :-1], tokens[:, 1:]


def loss_inputs(positions=50):
    x = torch.randn(positions, 12, dtype=torch.float64).requires_grad_()
    head = torch.randn(31, 12, dtype=torch.float64).requires_grad_()
    return x, head, torch.randint(31, (positions,))


def of_torch(x, head, following, chunk):
    options = torch.nn.LinearCrossEntropyOptions(batch_chunk_size=chunk)
    return torch.nn.functional.linear_cross_entropy(x, head, following, options=options)


@pytest.mark.parametrize("chunk", [1, 7, 50, 64])
@pytest.mark.parametrize("way", [chunked_loss, language_loss, of_torch], ids=lambda way: way.__name__)
def test_chunked_losses_equal_plain_cross_entropy(way, chunk):
    if way is of_torch and not hasattr(torch.nn.functional, "linear_cross_entropy"):
        pytest.skip("this torch has no linear_cross_entropy")
    x, head, following = loss_inputs()
    plain = cross_entropy(linear(x, head), following)
    wanted = torch.autograd.grad(plain, (x, head))
    loss = way(x, head, following, chunk)
    found = torch.autograd.grad(loss, (x, head))
    tolerance = {"rtol": 1e-6, "atol": 1e-7} if way is not of_torch else {"rtol": 1e-5, "atol": 1e-6}
    torch.testing.assert_close(loss.double(), plain, **tolerance)
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, **tolerance)
    with torch.no_grad():
        torch.testing.assert_close(way(x, head, following, chunk).double(), plain, **tolerance)


@pytest.mark.parametrize("way", [chunked_loss, language_loss])
def test_logits_are_never_all_there(way):
    x, head, following = torch.randn(512, 8).requires_grad_(), torch.randn(1000, 8).requires_grad_(), torch.randint(1000, (512,))
    with LiveBytes() as meter:
        way(x, head, following, 16).backward()
    assert meter.peak < 512 * 1000 * 4 / 4
    with LiveBytes() as plain:
        cross_entropy(linear(x, head), following).backward()
    assert plain.peak > 512 * 1000 * 4


def test_memory_is_flat_in_depth():
    def peak(depth, memory):
        model, (tokens, following) = Language(depth, 16, 2, 64, memory=memory), batch(4, 65)
        model(tokens, following).backward()
        with LiveBytes() as meter:
            model(tokens, following).backward()
        return meter.peak

    assert peak(9, "reverse") == pytest.approx(peak(3, "reverse"), rel=0.01)
    assert peak(9, "store") > 2 * peak(3, "store")


@pytest.mark.parametrize("streams", [1, "1 with bits", 2, 3])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_gradients_under_every_policy(dropout, streams):
    kind = {"streams": 1, "bits": 4} if streams == "1 with bits" else {"streams": streams}
    model, (tokens, following) = Language(4, 16, 2, 16, memory="store", dropout=dropout, **kind).double(), batch()
    found = {}
    for model.net.memory in ("store", "checkpoint", rg.StoreLast(3), *(("reverse",) if streams != 1 else ())):
        model.zero_grad()
        torch.manual_seed(1)
        model(tokens, following).backward()
        found[str(model.net.memory)] = [p.grad for p in model.parameters()]
        assert all(p.grad.abs().max() > 1e-9 for p in model.parameters())
    for grads in found.values():
        for a, b in zip(grads, found["store"], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize("streams", [1, 2, 3])
def test_dropout_in_training_alone(streams):
    kind = {"depth": 2, "width": 16, "heads": 2, "context": 16, "memory": "store", "streams": streams}
    plain, model, (tokens, following) = Language(**kind), Language(**kind, dropout=0.3), batch()
    model.load_state_dict(plain.state_dict())  # the same keys
    assert model(tokens, following) != model(tokens, following)
    x, side = torch.randn(8, 16, 16), {"cos_LK": model.cos, "sin_LK": model.sin}
    for block, as_before in zip(model.net.blocks, plain.net.blocks, strict=True):
        for out, whole in ((block.f(x, **side), as_before.f(x, **side)), (block.g(x), as_before.g(x))):
            kept = out != 0
            assert kept.double().mean() == pytest.approx(0.7, abs=0.05)
            torch.testing.assert_close(out[kept], whole[kept] / 0.7)
    before = torch.get_rng_state()
    wanted = plain(tokens, following)
    wanted.backward()
    assert torch.equal(model.eval()(tokens, following), wanted)
    assert torch.equal(torch.get_rng_state(), before)  # nothing was drawn


def test_only_distances_count_for_rotary_positions():
    q, k = torch.randn(8, dtype=torch.float64), torch.randn(8, dtype=torch.float64)
    cos, sin = angles(32, 8)

    def score(i, j):
        a, b = (rotated(t.float()[None, None, None], cos[n : n + 1], sin[n : n + 1]).flatten() for t, n in ((q, i), (k, j)))
        return float(a @ b)

    assert score(7, 3) == pytest.approx(score(24, 20), abs=1e-5)
    assert score(7, 3) != pytest.approx(score(7, 4), abs=1e-3)


def test_no_byte_sees_what_follows():
    model = Language(3, 16, 2, 16)
    tokens = torch.randint(256, (1, 16))
    other = tokens.clone()
    other[0, 9:] = (other[0, 9:] + 1) % 256
    a, b = model(tokens), model(other)
    torch.testing.assert_close(a[:, :9], b[:, :9])
    assert not torch.allclose(a[:, 9:], b[:, 9:], atol=1e-3)


@pytest.mark.parametrize(("memory", "bits"), [("store", None), ("checkpoint", None), ("reverse", 4)])
def test_one_stream_has_the_same_parameters(memory, bits):
    torch.manual_seed(1)
    two = Language(3, 16, 2, 16)
    torch.manual_seed(1)
    one = Language(3, 16, 2, 16, memory=memory, streams=1, bits=bits)
    assert two.state_dict().keys() == one.state_dict().keys()
    x = one.embed.weight[:4][None]
    side = {"cos_LK": one.cos[:4], "sin_LK": one.sin[:4]}
    by_hand = x
    for block in one.net.blocks:
        by_hand = by_hand + block.f(by_hand, **side)
        by_hand = by_hand + block.g(by_hand)
    assert torch.equal(one.net(x, **side), by_hand) == (bits is None)  # it has noise in training
    assert torch.equal(one.eval().net(x, **side), by_hand)
    one(*batch()).backward()
    assert all(p.grad is not None for p in one.parameters())


def test_extends_a_prompt():
    model = Language(2, 16, 2, 8)
    torch.nn.init.normal_(model.embed.weight)
    one = model.extend(b"import", 20, generator=torch.Generator().manual_seed(1))
    assert len(one) == 20
    assert one == model.extend(b"import", 20, generator=torch.Generator().manual_seed(1))
    assert model.extend(b"import", 5, temperature=0) == model.extend(b"import", 5, temperature=0)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"depth": 0}, "depth must be 1 or more"),
        ({"streams": 0}, "streams must be 1 or more"),
        ({"heads": 3}, "width 16 is not a multiple of twice the heads, 3"),
        ({"heads": 16}, "each head needs an even width"),
        ({"streams": 1, "memory": "reverse"}, "a net of one stream cannot be reversed"),
        ({"streams": 2, "bits": 4}, "bits are for a net of one stream"),
        ({"streams": 1, "bits": 9}, "bits must be a whole number from 1 to 8"),
        ({"memory": "none"}, "unknown memory policy"),
        ({"dropout": 1.0}, "dropout must be 0 or more and less than 1, got 1.0"),
        ({"dropout": -0.1}, "dropout must be 0 or more and less than 1, got -0.1"),
    ],
)
def test_bad_sizes(sizes, message):
    with pytest.raises(rg.ProgramError, match=message):
        Language(**{"depth": 2, "width": 16, "heads": 2, "context": 8} | sizes)
    with pytest.raises(rg.ProgramError, match="longer than the context"):
        Language(1, 8, 2, 4)(torch.zeros(1, 5, dtype=torch.long))
    with pytest.raises(rg.ProgramError, match="empty prompt"):
        Language(1, 8, 2, 4).extend(b"", 1)
