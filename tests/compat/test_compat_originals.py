"""What the READMEs and test suites of the originals do with the drop-in replacements, without the packages."""

import warnings

import pytest
import torch
from support import REPLAYED, WIDTH, Attend, assert_same, draw, gradients, mlp, mlps, rg
from torch import nn

from retrograde.compat import memcnn, nuwa, nuwa_video_audio, reformer, revlib, revtorch

# -- masks that the caller edits after the call ------------------------------------------------------------------------


class Masked(nn.Module):
    def __init__(self):
        super().__init__()
        self.attend = Attend()

    def forward(self, x, context=None, mask=None, context_mask=None):
        return self.attend(x, context, None if mask is None else mask[:, None])


def masked_nuwa():
    net = nuwa.ReversibleSequence([(Masked(), Masked()) for _ in range(3)], {"mask": [(True, False)] * 3})
    return net, (draw(2, 5, WIDTH),), {"mask": torch.rand(2, 5) > 0.3}


def masked_reformer():
    net = reformer.ReversibleSequence([(Masked(), mlp()) for _ in range(3)])
    return net, (draw(2, 5, 2 * WIDTH),), {"mask": torch.rand(2, 5) > 0.3}


def masked_dual():
    kinds = list(nuwa_video_audio.BLOCKS)
    net = nuwa_video_audio.DualModalityReversibleSequence([[Masked() for _ in range(4)] for _ in kinds], kinds)
    side = {"context": draw(2, 5, WIDTH), "video_mask": torch.rand(2, 5) > 0.3, "audio_mask": torch.rand(2, 5) > 0.3}
    return net, (draw(2, 5, WIDTH), draw(2, 5, WIDTH)), side


@pytest.mark.parametrize("memory", REPLAYED)
@pytest.mark.parametrize("make", [masked_nuwa, masked_reformer, masked_dual])
def test_a_mask_edited_after_the_call(make, memory):
    """As NUWA does it: `text_mask *= …` after the encoder has run."""
    net, inputs, side = make()
    wanted = [*inputs, *net.parameters()]

    def edited():
        given = {name: value.clone() if value.dtype is torch.bool else value for name, value in side.items()}
        out = net(*inputs, **given)
        for value in given.values():
            if value.dtype is torch.bool:
                value *= torch.tensor([[False], [True]])
        return out

    net.memory = "store"
    true = gradients(lambda: net(*inputs, **side), wanted)
    net.memory = memory
    assert_same(gradients(edited, wanted), true)


# -- reformer ----------------------------------------------------------------------------------------------------------


class Hashing(nn.Module):
    """As LSH attention in chunks: what it draws for each is cached, under the name of its depth."""

    def __init__(self, chunks):
        super().__init__()
        self.fn, self.attn_chunks, self.cache, self.depths = mlp(), chunks, {}, []

    def forward(self, x, _reverse=False, _depth=None):
        self.depths.append(_depth)
        return torch.cat([self.one(chunk, _reverse, _depth) for chunk in x.chunk(self.attn_chunks)])

    def one(self, x, reverse, depth):
        drawn, name = torch.rand_like(x), str(depth)
        if reverse:
            assert torch.equal(self.cache[name], drawn)
        elif self.training:
            self.cache = {**self.cache, name: drawn}
        return self.fn(x * drawn)


@pytest.mark.parametrize("chunks", [1, 2, 3])
def test_attention_in_chunks(chunks):
    """The original reads what was cached for the last chunk."""
    fns = [Hashing(chunks) for _ in range(3)]
    net = reformer.ReversibleSequence([(fn, lambda x, **_: x.sin()) for fn in fns], send_signal=True)
    x = draw(6, 5, 2 * WIDTH)
    wanted = [x, *net.parameters()]
    found = gradients(lambda: net(x), wanted)
    assert [fn.depths for fn in fns] == [[0, 0], [1, 1], [2, 2]]
    names = [["0", "0, chunk 2", "0, chunk 3"][:chunks], ["1", "1, chunk 2", "1, chunk 3"][:chunks]]
    assert [list(fn.cache) for fn in fns[:2]] == names
    net.memory = "store"
    assert_same(found, gradients(lambda: net(x), wanted))


class Recorded(nn.Module):
    """As LSH attention: while it is recorded it also computes its weights, which only the recorder sees."""

    def __init__(self):
        super().__init__()
        self.fn, self.callback = mlp(), None

    def forward(self, x):
        if self.callback is not None:
            self.callback(x.exp().softmax(-1).detach())
        return self.fn(x)


class Recorder(nn.Module):
    """As that of reformer-pytorch: it records the forward pass, and not backward."""

    def __init__(self, net):
        super().__init__()
        self.net, self.recordings = net, []

    def forward(self, x):
        self.wire(self.recordings.append)
        out = self.net(x)
        self.wire(None)
        return out

    def wire(self, callback):
        for module in self.net.modules():
            if isinstance(module, Recorded):
                module.callback = callback


@pytest.mark.parametrize("memory", REPLAYED)
def test_recorder(memory):
    net = reformer.ReversibleSequence([(Recorded(), mlp()) for _ in range(3)], memory=memory)
    model, x = Recorder(net), draw(2, 5, 2 * WIDTH)
    wanted = [x, *net.parameters()]
    found = gradients(lambda: model(x), wanted)
    assert len(model.recordings) == 3
    net.memory = "store"
    assert_same(found, gradients(lambda: model(x), wanted))


# -- MemCNN ------------------------------------------------------------------------------------------------------------


class Affine(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(WIDTH, 2 * WIDTH).double()

    def forward(self, x):
        scale, shift = self.net(x).tanh().chunk(2, -1)
        return scale.exp(), shift


BLOCKS = {memcnn.AdditiveBlock: (memcnn.AdditiveCoupling, mlp), memcnn.AffineBlock: (memcnn.AffineCoupling, Affine)}


@pytest.mark.parametrize("block", BLOCKS)
def test_old_names_of_memcnn(block):
    """The same couplings, which keep nothing by themselves."""
    coupling, make = BLOCKS[block]
    fns = make(), make()
    old, new = block(*fns), coupling(*fns)
    x = draw(3, 2 * WIDTH)
    wanted = [x, *old.parameters()]
    assert_same(gradients(lambda: old(x), wanted), gradients(lambda: new(x), wanted))
    assert_same(gradients(lambda: old.inverse(x), wanted), gradients(lambda: new.inverse(x), wanted))
    assert (old.implementation_fwd, old.implementation_bwd) == (1, 1)
    again = []
    fns[0].register_forward_hook(lambda *_: again.append(rg.replaying()))
    old(x).sum().backward()
    assert again == [False, True]
    assert list(block(make()).state_dict()) == list(coupling(make()).state_dict())
    with pytest.raises(NotImplementedError, match="unknown implementation 2"):
        block(make(), implementation_fwd=2)


class Same(nn.Module):
    def forward(self, x):
        return x

    inverse = forward


class Twice(nn.Module):
    def forward(self, x):
        y = x * x
        return y, y

    def inverse(self, y, z):
        return torch.max(y.sqrt(), z.sqrt())


class Half(Same):
    """forward makes a tensor, inverse does not."""

    def forward(self, x):
        return x * 1


def test_is_invertible_module_warns_of_shared_tensors():
    for module, text in {
        Same(): "Same: forward returns a tensor that it was given",
        Half(): "Half: inverse returns a tensor that it was given",
        Twice(): "Twice: forward returns the same tensor for several outputs",
    }.items():
        with pytest.warns(UserWarning, match=text):
            assert memcnn.is_invertible_module(module, (3, 4))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert memcnn.is_invertible_module(memcnn.AdditiveCoupling(mlp()), (3, 2 * WIDTH), torch.float64)


def test_several_backward_passes_of_memcnn():
    """`num_bwd_passes` has no effect: `retain_graph=True` says that backward will run again."""
    net = memcnn.InvertibleModuleWrapper(memcnn.AdditiveCoupling(mlp(), mlp()), num_bwd_passes=2)
    x = draw(3, 2 * WIDTH)
    y = net(x)
    back = [net.inverse(y), net.inverse(y)]
    back[0].sin().sum().backward()
    with pytest.raises(RuntimeError, match="retain_graph=True"):
        back[1].sin().sum().backward()
    x.grad = None
    y = net(x)
    back = [net.inverse(y), net.inverse(y)]
    back[0].sin().sum().backward(retain_graph=True)
    back[1].sin().sum().backward()
    assert_same([x.grad], [2 * x.detach().cos()])


def test_random_states_of_memcnn():
    """On a CPU there are none of devices."""
    devices, states = memcnn.get_device_states(torch.ones(2))
    assert (devices, states) == ([], [])
    memcnn.set_device_states(devices, states)


# -- revlib ------------------------------------------------------------------------------------------------------------


def merge(stream, out):
    return 0.9 * stream + 0.1 * out


def unmerge(stream, out):
    return (stream - 0.1 * out) / 0.9


@pytest.mark.parametrize("memory", REPLAYED)
@pytest.mark.parametrize("named", [True, False])
def test_addition_among_the_couplings_of_revlib(named, memory):
    """By its name or as None, in turn with one of the user's."""
    fns, x = [mlp(), nn.Identity(), mlp(), nn.Identity()], draw(3, 2 * WIDTH)
    add, subtract = (revlib.additive_coupling_forward, revlib.additive_coupling_inverse) if named else (None, None)
    couplings = {"coupling_forward": [merge, add], "coupling_inverse": [unmerge, subtract]}
    net = revlib.ReversibleSequential(*fns, **couplings, memory=memory)

    def by_hand():
        a, b = x.chunk(2, 1)
        for i, fn in enumerate(fns):
            a, b = b, (merge if i % 2 == 0 else torch.add)(a, fn(b))
        return torch.cat((a, b), 1)

    wanted = [x, *net.parameters()]
    assert_same(gradients(lambda: net(x), wanted), gradients(by_hand, wanted))
    assert_same([net.inverse(net(x))], [x])


def test_addition_by_its_name_is_addition():
    """So it has an exact form; the two functions undo each other, and one without the other is an error."""
    add, subtract = revlib.additive_coupling_forward, revlib.additive_coupling_inverse
    net = revlib.ReversibleSequential(*mlps(4), coupling_forward=[add], coupling_inverse=[subtract], arithmetic="exact")
    x = draw(3, 2 * WIDTH)
    assert_same([net.inverse(net(x))], [x], 1e-6)
    a, b = draw(), draw()
    assert_same([subtract(add(a, b), b)], [a])
    for options in ({"coupling_forward": [merge], "coupling_inverse": [subtract]}, {"coupling_inverse": [unmerge]}):
        with pytest.raises(rg.ProgramError, match="both coupling_forward and coupling_inverse"):
            revlib.ReversibleSequential(*mlps(2), **options)


def test_offload_tensor():
    x = draw(3, 4)
    y = revlib.offload_tensor(x, torch.zeros(1))
    y.square().sum().backward()
    assert_same([x.grad], [2 * x.detach()])


# -- RevTorch ----------------------------------------------------------------------------------------------------------


def test_several_backward_passes_of_revtorch():
    """`eagerly_discard_variables=False` has no effect, `retain_graph=True` has."""
    blocks = nn.ModuleList(revtorch.ReversibleBlock(mlp(), mlp()) for _ in range(3))
    net = revtorch.ReversibleSequence(blocks, eagerly_discard_variables=False)
    x = draw(3, 2 * WIDTH)
    loss = net(x).sin().sum()
    loss.backward(retain_graph=True)
    first = x.grad.clone()
    loss.backward()
    assert_same([x.grad], [2 * first])
