"""Where the originals are wrong, in the order of the table that lists it: each test shows that, and that ours is right."""

import copy
import tempfile
from functools import partial

import pytest
import torch
import torch.distributed as dist
from support import WIDTH, draw, loss_of, mlp
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils._pytree import tree_leaves, tree_map

from retrograde.errors import ProgramError, ReplayError

from .systems import (
    KINDS,
    MARKS,
    SYSTEMS,
    Mixed,
    assert_equal,
    gradient_error,
    hosts,
    is_float,
    leaves,
    measure,
    peer,
    relative,
)

pytestmark = MARKS
ALL = list(SYSTEMS)
PAIRS = ["reformer", "axial_attention", "nuwa"]  # those whose g can take side inputs
DEPTH = 3
WRONG = 1e-3  # an error of gradients in float64 that no rounding explains

every = pytest.mark.parametrize("system", SYSTEMS.values(), ids=str)


def three(system, blocks, options=None, measuring=measure, **given):
    """What the original, ours and the equations by hand give, each on copies of the blocks."""
    inputs = system.inputs()
    found = []
    for kind in (*KINDS, "by hand"):
        call, own = system.build(kind, blocks, **(options or {}))
        found.append(measuring(call, own, inputs, **given))
    return found


def assert_ours_alone_right(original, ours, true):
    assert gradient_error(original, true) > WRONG
    assert_equal(ours, true)


# -- the input does not require grad -----------------------------------------------------------------------------------


@every
def test_input_without_grad(system):
    blocks, inputs = system.blocks(DEPTH), leaves(system.inputs(), grad=False)
    original, _ = system.build("original", blocks)
    assert not any(t.requires_grad for t in tree_leaves(original(*inputs)))
    ours, true = (measure(*system.build(kind, blocks), inputs, grad=False) for kind in ("ours", "by hand"))
    assert_equal(ours, true)


# -- a context from an encoder with parameters -------------------------------------------------------------------------


class Encoded(nn.Module):
    """A net on a context that an encoder makes; counts how often backward goes through the encoder."""

    def __init__(self, net):
        super().__init__()
        self.net, self.encoder, self.passes = net, nn.Linear(WIDTH, WIDTH).double(), 0

    def forward(self, *inputs, text, **side):
        hidden = self.encoder(text)
        hidden.register_hook(self.count)
        return self.net(*inputs, context=hidden.tanh(), **side)

    def count(self, _):
        self.passes += 1


def encoded(system, kind, both=False):
    """The net with its encoder, and the arguments of a call."""
    torch.manual_seed(0)
    options, side = system.context(DEPTH, both)
    call, own = system.build(kind, system.blocks(DEPTH, Mixed), **options)
    net = Encoded(call)
    net.own = own
    return net, side


@every
def test_encoder_of_the_context_runs_backward_once(system):
    inputs, text, found, passes = system.inputs(), draw(3, 4, WIDTH), {}, {}
    for kind in (*KINDS, "by hand"):
        net, side = encoded(system, kind)
        found[kind] = measure(net, nn.ModuleList([net.own, net.encoder]), inputs, text=text, **side)
        passes[kind] = net.passes
    assert_equal(found["ours"], found["by hand"])
    assert passes["original"] >= DEPTH
    assert passes["ours"] == 1


@pytest.mark.parametrize("name", PAIRS)
def test_context_of_f_and_g(name):
    system, text = SYSTEMS[name], draw(3, 4, WIDTH)
    inputs = system.inputs()
    net, side = encoded(system, "original", both=True)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        measure(net, net.own, inputs, text=text, **side)
    found = []
    for kind in ("ours", "by hand"):
        net, side = encoded(system, kind, both=True)
        found.append(measure(net, nn.ModuleList([net.own, net.encoder]), inputs, text=text, **side))
    assert_equal(*found)


# -- autocast in the forward pass alone --------------------------------------------------------------------------------


class Seen(nn.Module):
    """A branch that writes down in which dtype it computes."""

    dtypes: list = []

    def __init__(self):
        super().__init__()
        self.fn = mlp().float()

    def forward(self, x):
        out = self.fn(x)
        Seen.dtypes.append(out.dtype)
        return out


def autocast(call):
    """The net under autocast; backward runs outside of it."""

    def wrapped(*inputs, **side):
        with torch.autocast("cpu", torch.bfloat16):
            out = call(*inputs, **side)
        return tree_map(torch.Tensor.float, out)

    return wrapped


@every
def test_autocast_of_the_forward_pass(system):
    blocks, inputs = system.blocks(32, Seen), tree_map(torch.Tensor.float, system.inputs())

    def measured(kind, **options):
        Seen.dtypes = dtypes = []
        call, own = system.build(kind, blocks, **options)
        return measure(autocast(call), own, inputs), set(dtypes)

    (original, dtypes), (true, _) = measured("original"), measured("by hand")
    assert dtypes == {torch.bfloat16, torch.float32}
    wrong = gradient_error(original, true)
    assert wrong > 2e-3
    (ours, dtypes), (stored, _) = measured("ours"), measured("ours", memory="store")
    assert dtypes == {torch.bfloat16}
    assert_equal(ours, stored, 1e-6)
    assert gradient_error(ours, true) < wrong  # the last bit of a sum may decide how the next function rounds to 16 bits


# -- two forward passes before a backward ------------------------------------------------------------------------------


def siamese(call, own, inputs):
    """The net on two inputs, one after the other, and one backward pass through both."""
    return measure(lambda *both: [call(*both[: len(inputs)]), call(*both[len(inputs) :])], own, (*inputs, *inputs))


@every
def test_two_forward_passes_before_a_backward(system):
    assert_ours_alone_right(*three(system, system.blocks(DEPTH, partial(mlp, dropout=0.3)), measuring=siamese))


# -- modules with a state ----------------------------------------------------------------------------------------------


class Normed(nn.Module):
    """A branch behind a BatchNorm of its features."""

    def __init__(self):
        super().__init__()
        self.norm, self.fn = nn.BatchNorm1d(WIDTH).double(), mlp()

    def forward(self, x):
        return self.fn(self.norm(x.transpose(1, 2)).transpose(1, 2))


@every
def test_batch_norm_moves_once_per_step(system):
    blocks, inputs = system.blocks(DEPTH, Normed), system.inputs()
    found, buffers = {}, {}
    for kind in (*KINDS, "by hand"):
        call, own = system.build(kind, blocks)
        found[kind] = measure(call, own, inputs)
        buffers[kind] = dict(own.named_buffers())
    counts = {kind: {int(t) for name, t in buffers[kind].items() if name.endswith("tracked")} for kind in buffers}
    assert counts == {"original": {2}, "ours": {1}, "by hand": {1}}
    assert_equal(found["ours"], found["by hand"])
    for name, true in buffers["by hand"].items():
        if is_float(true):
            assert relative(buffers["ours"][name], true) < 1e-12
            assert relative(buffers["original"][name], true) > WRONG


class Spectral(nn.Module):
    """A branch whose power iteration has not settled, as after a step of the optimizer."""

    def __init__(self):
        super().__init__()
        self.first, self.last = spectral_norm(nn.Linear(WIDTH, WIDTH).double()), nn.Linear(WIDTH, WIDTH).double()
        nn.init.normal_(self.first.parametrizations.weight.original)

    def forward(self, x):
        return self.last(self.first(x).tanh())


@every
def test_spectral_norm(system):
    assert_ours_alone_right(*three(system, system.blocks(DEPTH, Spectral)))


# -- functional_call ---------------------------------------------------------------------------------------------------


@every
def test_functional_call(system):
    blocks, others, inputs = system.blocks(DEPTH), system.blocks(DEPTH), system.inputs()
    true = measure(*system.build("by hand", others), inputs)
    for kind in KINDS:
        (net, own), values = system.build(kind, blocks), copy.deepcopy(others)
        tensors = {name: p for (name, _), p in zip(net.named_parameters(), values.parameters(), strict=True)}
        found = measure(lambda *x: torch.func.functional_call(net, tensors, x, tie_weights=False), values, inputs)
        if kind == "original":
            assert gradient_error(found, true) > WRONG
            assert all(p.grad is not None for p in own.parameters())
        else:
            assert_equal(found, true)
            assert all(p.grad is None for p in own.parameters())


# -- DDP ---------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def _one_process():
    """A group of one."""
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=0, world_size=1)
        yield
        dist.destroy_process_group()


@pytest.mark.parametrize("case", ["unused", "shared"])
@pytest.mark.usefixtures("_one_process")
@every
def test_ddp(system, case):
    blocks, inputs, found = system.blocks(DEPTH), system.inputs(), {}
    if case == "shared":
        for block in blocks[1:]:
            block[0] = blocks[0][0]
    for kind in (*KINDS, "by hand"):
        net, own = system.build(kind, blocks)
        call = net if kind == "by hand" else DDP(net, find_unused_parameters=case == "unused")
        if kind == "original":
            with pytest.raises(RuntimeError, match="ready only once"):
                measure(call, own, inputs)
        else:
            found[kind] = measure(call, own, inputs)
    assert_equal(found["ours"], found["by hand"])


# -- torch.autograd.grad, double backward ------------------------------------------------------------------------------


@every
def test_autograd_grad_of_parameters(system):
    blocks, inputs = system.blocks(DEPTH), leaves(system.inputs())
    found = {}
    for kind in (*KINDS, "by hand"):
        call, own = system.build(kind, blocks)
        loss = loss_of(call(*inputs))
        if kind == "original":
            with pytest.raises(RuntimeError, match="to not have been used in the graph"):
                torch.autograd.grad(loss, list(own.parameters()))
        else:
            found[kind] = torch.autograd.grad(loss, list(own.parameters()))
    assert all(relative(a, b) < 1e-9 for a, b in zip(found["ours"], found["by hand"], strict=True))


def penalized(call, own, inputs):
    """A loss of the output and of the gradient of the input."""

    def both(*inputs):
        out = call(*inputs)
        return [out, *torch.autograd.grad(loss_of(out), tree_leaves(inputs), create_graph=True)]

    return measure(both, own, inputs)


@every
def test_double_backward(system):
    assert_ours_alone_right(*three(system, system.blocks(DEPTH), measuring=penalized))


# -- edits between forward and backward --------------------------------------------------------------------------------


def test_reformer_output_edited_in_place():
    """Ours is a tensor of its own, so the edit is autograd's to account for."""

    def edited(call, own, inputs):
        return measure(lambda x: call(x).mul_(2), own, inputs)

    system = SYSTEMS["reformer"]
    assert_ours_alone_right(*three(system, system.blocks(DEPTH), measuring=edited))


@every
def test_parameter_changed_before_backward(system):
    blocks, inputs = system.blocks(DEPTH), system.inputs()

    def measured(kind):
        call, own = system.build(kind, blocks)

        def changing(*inputs):
            out = call(*inputs)
            with torch.no_grad():
                for p in own.parameters():
                    p.mul_(1.5)
            return out

        return measure(changing, own, inputs)

    assert gradient_error(measured("original"), measure(*system.build("by hand", blocks), inputs)) > WRONG
    with pytest.raises(ReplayError, match="was changed between the forward pass and backward"):
        measured("ours")


# -- backward in eval() ------------------------------------------------------------------------------------------------


class Noisy(nn.Module):
    """A branch that draws random numbers in eval as well."""

    def __init__(self):
        super().__init__()
        self.fn = mlp()

    def forward(self, x):
        return self.fn(nn.functional.dropout(x, 0.3, training=True))


def evaluated(call, own, inputs):
    """Backward in eval, after a step in training."""
    measure(call, own, inputs, seed=1)
    if isinstance(call, nn.Module):
        call.eval()
    return measure(call, own.eval(), inputs)


@every
def test_backward_in_eval_of_a_net_never_trained(system):
    blocks, inputs = system.blocks(DEPTH).eval(), system.inputs()
    call, own = system.build("original", blocks)
    with pytest.raises(TypeError):
        measure(call.eval(), own, inputs)
    call, own = system.build("ours", blocks)
    assert_equal(measure(call.eval(), own, inputs), measure(*system.build("by hand", blocks), inputs))


@every
def test_backward_in_eval_after_training(system):
    assert_ours_alone_right(*three(system, system.blocks(DEPTH, Noisy), measuring=evaluated))


def test_backward_of_a_language_model_in_eval():
    """LSH attention caches its buckets in training alone: the second run must hash again."""
    package = peer("reformer_pytorch.reformer_pytorch")
    options = {
        "num_tokens": 20, "dim": 16, "depth": 2, "max_seq_len": 32, "heads": 2, "dim_head": 8, "bucket_size": 4, "n_hashes": 2,
    }  # fmt: skip
    original, ours = hosts(package, SYSTEMS["reformer"], lambda: package.ReformerLM(**options).double())
    stored = package.ReformerLM(**options, reverse_thres=32).double()
    stored.load_state_dict(ours.state_dict())
    inputs = (torch.randint(0, 20, (2, 32)),)
    with pytest.raises(TypeError):
        measure(original.eval(), original, inputs)
    assert_equal(measure(ours.eval(), ours, inputs), measure(stored.eval(), stored, inputs))


# -- layer_dropout under reverse_thres ---------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
def test_layer_dropout_under_reverse_thres(seed):
    system, options = SYSTEMS["reformer"], {"layer_dropout": 0.5, "reverse_thres": 5}
    blocks, inputs = system.blocks(5, partial(mlp, dropout=0.3)), system.inputs()
    original, _ = system.build("original", blocks, **options)
    assert not original(*inputs).requires_grad
    ours, true = (measure(*system.build(kind, blocks, **options), inputs, seed=seed) for kind in ("ours", "by hand"))
    assert_equal(ours, true)


# -- signals in mutable defaults ---------------------------------------------------------------------------------------


class Signalled(nn.Module):
    def __init__(self):
        super().__init__()
        self.fn, self.heard = mlp(), []

    def forward(self, x, **signals):
        self.heard.append(signals)
        return self.fn(x)


@pytest.mark.parametrize("kind", KINDS)
def test_signals_of_one_block_reach_another(kind):
    module, (x,) = SYSTEMS["reformer"].module(kind), SYSTEMS["reformer"].inputs()
    first, second = Signalled(), Signalled()
    try:
        module.ReversibleBlock(first, Signalled(), depth=7, send_signal=True)(x)
        module.ReversibleBlock(second, Signalled())(x)
    finally:
        for defaults in module.ReversibleBlock.forward.__defaults__ or ():
            if defaults:
                defaults.clear()
    told = {"_reverse": False, "_depth": 7}
    assert first.heard[-1] == told
    assert second.heard == [told if kind == "original" else {}]


# -- drift -------------------------------------------------------------------------------------------------------------


def linear_loss(out):
    """One whose gradient does not depend on the output: what differs comes from backward alone."""
    generator = torch.Generator().manual_seed(1)
    return sum((t * torch.randn(t.shape, generator=generator).to(t.dtype)).sum() for t in tree_leaves(out))


def drifts(system, dtype, depth, gain=1.0, **options):
    """Errors of gradients against float64: the original, ours, stored activations."""
    torch.manual_seed(1)
    blocks, inputs = system.blocks(depth).to(dtype), tree_map(lambda t: t.detach().to(dtype), system.inputs())
    with torch.no_grad():
        for p in blocks.parameters():
            p.mul_(gain)
    wide = tree_map(torch.Tensor.double, inputs)
    true = measure(*system.build("by hand", copy.deepcopy(blocks).double()), wide, loss=linear_loss)
    builds = [system.build("original", blocks), system.build("ours", blocks, **options), system.build("by hand", blocks)]
    return [gradient_error(measure(*built, inputs, loss=linear_loss), true) for built in builds]


@every
def test_bfloat16(system):
    original, ours, stored = drifts(system, torch.bfloat16, depth=128)
    assert original > 2 * stored
    assert ours < 1.2 * stored


@every
def test_float32_with_large_branches(system):
    """Ours needs to be asked: in float32 arithmetic="auto" adds as the original does."""
    original, ours, stored = drifts(system, torch.float32, depth=64, gain=3.0, arithmetic="exact")
    assert original > 4 * stored
    assert ours < 2 * stored


# -- functions that return the wrong thing -----------------------------------------------------------------------------


class Returns(nn.Module):
    """A branch whose output is bent by `how`."""

    def __init__(self, fn, how):
        super().__init__()
        self.fn, self.how = fn, how

    def forward(self, x):
        return self.how(self.fn(x))


def assert_refused_at_once(system, how, late):
    """The original goes through the forward pass and fails in backward, if at all; ours names the function."""
    blocks, inputs = system.blocks(2), leaves(system.inputs())
    blocks[1][0] = Returns(blocks[1][0], how)
    out = system.build("original", blocks)[0](*inputs)
    if late is not None:
        with pytest.raises(late):
            loss_of(out).backward()
    with pytest.raises(ProgramError, match=r"update \d+: x1 \+= Returns"):
        system.build("ours", blocks)[0](*inputs)


@pytest.mark.parametrize("name", [name for name in ALL if name != "se3_transformer"])
def test_shape_that_broadcasts(name):
    assert_refused_at_once(SYSTEMS[name], lambda out: out[:1], late=RuntimeError)


@pytest.mark.parametrize("name", [name for name in ALL if name != "se3_transformer"])
def test_number_instead_of_a_tensor(name):
    assert_refused_at_once(SYSTEMS[name], lambda out: 0.5, late=Exception)


def test_key_that_is_not_returned():
    system = SYSTEMS["se3_transformer"]
    blocks = system.blocks(1)
    blocks[0][0] = Returns(blocks[0][0], lambda out: {"0": out["0"]})
    with pytest.raises(KeyError) as caught:
        system.build("original", blocks)[0](*system.inputs())
    assert "Returns" not in str(caught.value)
    with pytest.raises(ProgramError, match="Returns"):
        system.build("ours", blocks)[0](*system.inputs())


def test_odd_width():
    system, blocks = SYSTEMS["reformer"], SYSTEMS["reformer"].blocks(1)
    x = draw(3, 5, 2 * WIDTH + 1)
    with pytest.raises(RuntimeError) as caught:
        system.build("original", blocks)[0](x)
    assert "odd" not in str(caught.value)
    with pytest.raises(ProgramError, match="odd size 13 along dim 2"):
        system.build("ours", blocks)[0](x)


# -- what the originals pass over in silence ---------------------------------------------------------------------------


def test_route_of_too_few_depths():
    system = SYSTEMS["nuwa"]
    blocks, inputs, context = system.blocks(3, Mixed), system.inputs(), draw(3, 4, WIDTH)
    options = {"args_route": {"context": ((True, False),)}}
    found = measure(*system.build("original", blocks, **options), inputs, context=context)
    assert found["gradient of 0.0.mix.weight"].norm() > 0
    assert found["gradient of 2.0.mix.weight"].norm() == 0
    with pytest.raises(ProgramError, match="context"):
        system.build("ours", blocks, **options)


def test_fewer_types_than_blocks():
    system = SYSTEMS["nuwa_video_audio"]
    blocks, options = system.blocks(3), {"types": ["intra_modality_self_attn"]}
    assert len(system.build("original", blocks, **options)[0].net.blocks) == 1
    with pytest.raises(ProgramError, match="3 blocks and 1 "):
        system.build("ours", blocks, **options)


def test_dict_of_different_shapes():
    """The original joins the tensors of a dict along the last dim."""
    system = SYSTEMS["se3_transformer"]
    blocks = nn.ModuleList(nn.ModuleList(PerKey() for _ in range(2)) for _ in range(DEPTH))
    inputs = ({"0": draw(3, 5, WIDTH), "1": draw(2, 4, 3, WIDTH)},)
    with pytest.raises(RuntimeError):
        system.build("original", blocks)[0](*inputs)
    assert_equal(*(measure(*system.build(kind, blocks), inputs) for kind in ("ours", "by hand")))


class PerKey(nn.Module):
    def __init__(self):
        super().__init__()
        self.fns = nn.ModuleDict({"0": mlp(), "1": mlp()})

    def forward(self, x):
        return {key: self.fns[key](x[key]) for key in x}
