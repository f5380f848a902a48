"""rg.from_transformer against the layers' own parts, wired by hand, in float64."""

import pytest
import torch
from support import REPLAYED, assert_same, draw, gradients, rg
from torch import nn

WIDTH, HEADS, INNER, DEPTH = 8, 2, 12, 3
CAUSAL = nn.Transformer.generate_square_subsequent_mask(5, dtype=torch.float64)
PADDING = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])


def encoder(norm=True, **options):
    options = {"batch_first": True, "norm_first": True, "dropout": 0.0} | options
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, INNER, **options)
    return shaken(nn.TransformerEncoder(layer, DEPTH, nn.LayerNorm(WIDTH) if norm else None, enable_nested_tensor=False))


def decoder(**options):
    options = {"batch_first": True, "norm_first": True, "dropout": 0.0} | options
    return shaken(nn.TransformerDecoder(nn.TransformerDecoderLayer(WIDTH, HEADS, INNER, **options), DEPTH, nn.LayerNorm(WIDTH)))


def shaken(stack):
    """Copies of a layer begin alike, and with biases of zero."""
    stack.double()
    with torch.no_grad():
        for p in stack.parameters():
            p.add_(0.2 * torch.randn_like(p))
    return stack


def encoder_by_hand(stack, x, mask=None, src_key_padding_mask=None, is_causal=False):
    x1 = x2 = x
    for layer in stack.layers:
        padding = src_key_padding_mask
        if padding is not None:
            padding = torch.zeros_like(padding, dtype=x.dtype).masked_fill(padding, -torch.inf)
        x1 = x1 + layer._sa_block(layer.norm1(x2), mask, padding, is_causal)
        x2 = x2 + layer._ff_block(layer.norm2(x1))
    return stack.norm((x1 + x2) / 2) if stack.norm else (x1 + x2) / 2


def decoder_by_hand(stack, x, memory, tgt_mask=None, memory_key_padding_mask=None, **_):
    x1 = x2 = x
    for layer in stack.layers:
        own = layer._sa_block(layer.norm1(x2), tgt_mask, None)
        x1 = x1 + own + layer._mha_block(layer.norm2(x2 + own), memory, None, memory_key_padding_mask)
        x2 = x2 + layer._ff_block(layer.norm3(x1))
    return stack.norm((x1 + x2) / 2)


@pytest.mark.parametrize("memory", REPLAYED)
@pytest.mark.parametrize(
    "side", [{}, {"mask": CAUSAL, "is_causal": True}, {"mask": CAUSAL, "src_key_padding_mask": PADDING}], ids=str
)
def test_encoder(memory, side):
    stack, x = encoder(activation="gelu"), draw(2, 5, WIDTH)
    net = rg.from_transformer(stack, memory=memory)
    wanted = [x, *stack.parameters()]
    assert set(net.parameters()) == set(stack.parameters())
    assert_same(gradients(lambda: net(x, **side), wanted), gradients(lambda: encoder_by_hand(stack, x, **side), wanted))


@pytest.mark.parametrize("memory", REPLAYED)
def test_decoder_with_gradients_of_its_memory(memory):
    stack, x, context = decoder(), draw(2, 5, WIDTH), draw(2, 4, WIDTH)
    net = rg.from_transformer(stack, memory=memory)
    padding = torch.zeros(2, 4, dtype=torch.float64).masked_fill(torch.tensor([[0, 0, 0, 0], [0, 0, 1, 1]]).bool(), -torch.inf)
    side = {"memory": context, "tgt_mask": CAUSAL, "memory_key_padding_mask": padding, "tgt_is_causal": True}
    wanted = [x, context, *stack.parameters()]
    assert set(net.parameters()) == set(stack.parameters())
    assert_same(gradients(lambda: net(x, **side), wanted), gradients(lambda: decoder_by_hand(stack, x, **side), wanted))


@pytest.mark.parametrize("make", [encoder, decoder])
def test_dropout_and_a_sequence_first(make):
    """The dropouts of the layer are active and drawn once; shapes are as the layer was built for."""
    stack, x = make(dropout=0.3, batch_first=False), draw(5, 2, WIDTH)
    side = {"memory": draw(4, 2, WIDTH)} if make is decoder else {}
    net = rg.from_transformer(stack)
    wanted = [x, *side.values(), *stack.parameters()]
    found = gradients(lambda: net(x, **side), wanted)
    net.memory = "store"
    assert_same(found, gradients(lambda: net(x, **side), wanted))
    stack.eval()  # the very same modules
    assert torch.equal(net(x, **side), net(x, **side))


def test_dropout_draws_as_the_layers_do():
    stack, x = encoder(dropout=0.3), draw(2, 5, WIDTH)
    net = rg.from_transformer(stack)
    wanted = [x, *stack.parameters()]
    assert_same(gradients(lambda: net(x), wanted), gradients(lambda: encoder_by_hand(stack, x), wanted))


@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("make", [encoder, decoder])
def test_layers_as_they_are(make, norm_first):
    """With bits: in eval mode the stack itself to the bit, and in training the gradients of store to the bit, dropout on."""
    stack, x = make(dropout=0.3, norm_first=norm_first), draw(2, 5, WIDTH)
    side = {"memory": draw(2, 4, WIDTH), "tgt_mask": CAUSAL} if make is decoder else {"mask": CAUSAL}
    net = rg.from_transformer(stack, bits=4)
    assert net.memory == "reverse"
    assert net.state_dict().keys() == stack.state_dict().keys()
    wanted = [x, *(t for t in side.values() if t.requires_grad), *stack.parameters()]
    found = gradients(lambda: net(x, **side), wanted)
    net.memory = "store"
    for a, b in zip(found, gradients(lambda: net(x, **side), wanted), strict=True):
        assert torch.equal(a, b)
    plain = gradients(lambda: stack(x, **side), wanted)
    assert not any(torch.equal(a, b) for a, b in zip(found, plain, strict=True))  # there is noise
    assert torch.equal(net.eval()(x, **side), stack.eval()(x, **side))
    with pytest.raises(rg.ProgramError, match="two names of the same"):
        rg.from_transformer(encoder(), bits=4)(x, mask=CAUSAL, src_mask=CAUSAL)
    with pytest.raises(rg.ProgramError, match="got a Linear"):
        rg.from_transformer([nn.Linear(4, 4)], bits=4)  # type: ignore[list-item]


def test_layers_one_by_one():
    stack, x = encoder(norm=False), draw(2, 5, WIDTH)
    whole = rg.from_transformer(stack)(x, mask=CAUSAL)
    assert torch.equal(rg.from_transformer(stack.layers)(x, src_mask=CAUSAL), whole)
    assert torch.equal(rg.from_transformer(list(stack.layers))(x, mask=CAUSAL), whole)
    assert rg.from_transformer(stack.layers[0])(x).shape == x.shape
    with pytest.raises(rg.ProgramError, match="two names of the same"):
        rg.from_transformer(stack)(x, mask=CAUSAL, src_mask=CAUSAL)


def test_masks_are_seen():
    """What follows does not change what comes before, and padding is not read."""
    stack, x = encoder(), draw(2, 5, WIDTH, grad=False)
    net = rg.from_transformer(stack)
    other = x.clone()
    other[:, 3:] = draw(2, 2, WIDTH, grad=False)  # not a shift, which the norms would take away
    assert torch.allclose(net(x, mask=CAUSAL)[:, :3], net(other, mask=CAUSAL)[:, :3])
    assert not torch.allclose(net(x)[:, :3], net(other)[:, :3])
    assert torch.allclose(net(x, src_key_padding_mask=PADDING)[1, :3], net(other, src_key_padding_mask=PADDING)[1, :3])


def test_refusals():
    with pytest.raises(rg.ProgramError, match=r"layer 0 is post-norm .*norm_first=True"):
        rg.from_transformer(encoder(norm_first=False))
    with pytest.raises(rg.ProgramError, match="got a Linear"):
        rg.from_transformer(nn.Linear(4, 4))  # type: ignore[arg-type]
    with pytest.raises(rg.ProgramError, match="got a Linear"):
        rg.from_transformer([nn.Linear(4, 4)])  # type: ignore[list-item]

    with pytest.raises(rg.ProgramError, match="got a NoneType"):
        rg.from_transformer(None)  # type: ignore[arg-type]

    class Own(nn.TransformerEncoderLayer):
        def _ff_block(self, x):
            return 2 * super()._ff_block(x)

    with pytest.raises(rg.ProgramError, match="Own has a _ff_block of its own"):
        rg.from_transformer(Own(WIDTH, HEADS, INNER, norm_first=True))


def test_what_would_not_run_is_refused():
    """Hooks of a layer or of the whole stack, and methods that were replaced on one of them."""
    for of in (lambda stack: stack, lambda stack: stack.layers[1]):
        stack = encoder()
        of(stack).register_forward_hook(lambda module, given, out: 2 * out)
        with pytest.raises(rg.ProgramError, match="has hooks, which would never run"):
            rg.from_transformer(stack)
        stack = encoder()
        of(stack).forward = lambda x, **side: x
        with pytest.raises(rg.ProgramError, match="has a forward of its own"):
            rg.from_transformer(stack)
    stack = encoder()
    stack.layers[2]._ff_block = lambda x: x
    with pytest.raises(rg.ProgramError, match="has a _ff_block of its own"):
        rg.from_transformer(stack)
    stack = encoder()
    seen = []
    stack.layers[1].self_attn.register_forward_hook(lambda *given: seen.append(1))  # of a part: it runs
    rg.from_transformer(stack)(draw(2, 5, WIDTH))
    assert seen
