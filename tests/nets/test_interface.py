"""The Python interface: public names, types, docstrings, containers, routes, units of policies, nets on the meta device."""

import copy
import importlib
import inspect
import json
import pickle
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support import WIDTH, Logged, assert_same, draw, gradients, mlp, rg
from torch import nn

from retrograde import memory

PUBLIC = ("errors", "rules", "update", "wirings", "memory", "modules", "sequence", "transformer", "optimizer", "check")
PACKAGES = ("compat", "integrations", "models")


def public_modules():
    names = [f"retrograde.{name}" for name in PUBLIC]
    for package in PACKAGES:
        folder = importlib.import_module(f"retrograde.{package}").__path__
        names += [f"retrograde.{package}.{found.name}" for found in pkgutil.iter_modules(folder) if found.name[0] != "_"]
    return [importlib.import_module(name) for name in names]


def sequence(depth=3, **options):
    return rg.ReversibleSequence([(mlp(), mlp()) for _ in range(depth)], **options)


# -- names -------------------------------------------------------------------------------------------------------------


def test_dir_shows_public_names():
    assert dir(rg) == sorted(rg.__all__)
    assert not [name for name in dir(rg) if name.startswith("_")]
    assert all(hasattr(rg, name) for name in rg.__all__)


def test_every_public_module_says_what_is_public():
    for module in public_modules():
        assert module.__all__, module.__name__
        assert len(set(module.__all__)) == len(module.__all__), module.__name__
        for name in module.__all__:
            assert not name.startswith("_")
            assert hasattr(module, name), (module.__name__, name)


def test_every_error_is_exported():
    """Each derives from RetrogradeError, and `except rg.…` finds it."""
    from retrograde import errors
    from retrograde.training.errors import TrainingError

    kinds = {name for name, made in vars(errors).items() if inspect.isclass(made) and issubclass(made, Exception)}
    assert kinds >= {"BudgetTooSmall", "Edited", "EditedInBackward", "Freed", "NotRepeated", "ProgramError", "TrainingError"}
    for name in kinds:
        assert getattr(rg, name) is getattr(errors, name)
        assert issubclass(getattr(rg, name), rg.RetrogradeError)
    assert TrainingError is rg.TrainingError


def test_old_paths():
    modules, home = importlib.import_module("retrograde.modules"), importlib.import_module("retrograde.sequence")
    for name in ("Block", "ReversibleSequence"):
        assert getattr(modules, name) is getattr(home, name)
    assert modules.ReversibleSequence is rg.ReversibleSequence
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = modules.nothing


def test_a_net_survives_a_pickle_by_its_old_path():
    net = sequence()
    x = draw(grad=False)
    text = pickle.dumps(net, protocol=0)
    assert b"retrograde.sequence" in text
    old = pickle.loads(text.replace(b"retrograde.sequence", b"retrograde.modules"))
    assert torch.equal(old(x), net(x))


# -- types and help ----------------------------------------------------------------------------------------------------

TYPED = """
import torch
import retrograde as rg

f, g = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
pairs, updates = [(f, g)], rg.wirings.pair(f, g)
x = torch.ones(2, 4)
net = rg.ReversibleSequence(pairs, memory="reverse", arithmetic="auto", verify="warn", split="chunk", merge=None)
net.memory = rg.Budget("4GiB")
net = rg.ReversibleSequence(pairs, route={"mask": (True, False), "context": [(True, True)]})
net.route = (True, True)
part: rg.ReversibleSequence = net[1:]
block: torch.nn.Module = net[0]
total: torch.Tensor = rg.run(updates, {"x1": x, "x2": x}, memory=rg.StoreLast(blocks=2))["x1"]
total = rg.Reversible(updates).forward({"x1": x, "x2": x})["x2"]
"""
WRONG = """
rg.ReversibleSequence(pairs, memory="revers")
rg.ReversibleSequence(pairs, arithmetic="exakt")
rg.ReversibleSequence(pairs, verify="raise")
rg.ReversibleSequence(pairs, split="half")
rg.ReversibleSequence(pairs, merge="average")
rg.ReversibleSequence(pairs, route={"mask": True})
rg.Reversible(updates, memory="revers")
rg.run(updates, {"x1": x, "x2": x}, memory="revers")
rg.invert(updates, {"x1": x, "x2": x}, arithmetic="exakt")
net.memory = "revers"
"""


def test_pyright_knows_the_arguments(tmp_path):
    """Nothing to say about the right ones; every wrong line is an error."""
    pyright = Path(sys.executable).with_name("pyright")
    if not pyright.exists():
        pytest.skip("pyright is not installed")
    (tmp_path / "used.py").write_text(TYPED + WRONG)
    source = str(Path(rg.__file__).parent.parent)
    (tmp_path / "pyrightconfig.json").write_text(json.dumps({"extraPaths": [source]}))
    command = [str(pyright), "--outputjson", "--pythonpath", sys.executable, "-p", str(tmp_path)]
    found = json.loads(subprocess.run(command, capture_output=True, text=True, check=False).stdout)
    lines = {one["range"]["start"]["line"] for one in found["generalDiagnostics"] if one["severity"] == "error"}
    first = len(TYPED.splitlines()) + 1
    assert lines == set(range(first, first + len(WRONG.splitlines()) - 1)), found["generalDiagnostics"]


def net_classes():
    for module in public_modules():
        for name in module.__all__:
            made = vars(module).get(name)
            if inspect.isclass(made) and issubclass(made, nn.Module) and made.__module__ == module.__name__:
                yield made


def test_help_of_forward_is_ours():
    torchs = inspect.getdoc(nn.Module.forward)
    classes = [kind for kind in net_classes() if kind.forward is not nn.Module.forward]
    assert len(classes) > 20
    assert [kind for kind in classes if inspect.getdoc(kind.forward) in (None, torchs)] == []
    for kind in (rg.Reversible, rg.ReversibleSequence):
        assert kind.forward.__doc__


NAMED = [rg.Update, rg.Affine, rg.Momentum, rg.StoreLast, rg.Anchor, rg.Reversible, rg.ReversibleSequence, rg.from_transformer]


@pytest.mark.parametrize("made", NAMED, ids=lambda thing: thing.__name__)
def test_docstrings_name_every_argument(made):
    for name in inspect.signature(made).parameters:
        assert f"`{name}`" in inspect.getdoc(made), name


def test_rules_have_a_repr():
    class Scale(rg.Rule):
        def __init__(self, by, deep=2):
            self.by, self.deeper = by, deep

        def apply(self, target, out):
            return target * self.by

        def undo(self, target, out):
            return target / self.by

    assert repr(rg.Add()) == "Add()"
    assert repr(rg.Affine(limit=2.0)) == "Affine(log=True, limit=2.0)"
    assert repr(rg.Momentum(0.5)) == "Momentum(gamma=0.5)"
    assert repr(Scale(3)) == "Scale(by=3)"
    assert repr(rg.Update("a", mlp(), "b").inverse().rule) == "Inverted(rule=Add())"


# -- a sequence is a container -----------------------------------------------------------------------------------------


def test_sequence_is_a_container():
    net = sequence(4)
    assert len(net) == 4
    assert list(net) == list(net.blocks) == [net[i] for i in range(4)]
    assert net[-1] is net.blocks[3]
    assert net[-4] is net.blocks[0]
    for wrong in (4, -5):
        with pytest.raises(IndexError):
            net[wrong]


def test_a_slice_is_a_net_that_shares_the_blocks():
    """With all options, the route cut to its blocks."""

    class Gated(nn.Module):
        def __init__(self):
            super().__init__()
            self.fn = mlp()

        def forward(self, x, gain=1.0):
            return self.fn(x) * gain

    route = {"gain": [(True, False), (False, True), (False, False), (True, True)]}
    options = {"streams": 3, "split": "copy", "dim": 1, "merge": "sum", "arithmetic": "exact", "verify": "warn"}
    net = rg.ReversibleSequence([(Gated(), Gated()) for _ in range(4)], route=route, memory=rg.StoreLast(2), **options).eval()
    part = net[1:3]
    assert type(part) is rg.ReversibleSequence
    assert list(part) == list(net)[1:3]
    assert not part.training
    for name in ("streams", "split", "dim", "merge", "memory", "arithmetic", "verify"):
        assert getattr(part, name) == getattr(net, name)
    same = rg.ReversibleSequence(list(net)[1:3], route={"gain": route["gain"][1:3]}, **options)
    x, gain = draw(), draw(1, WIDTH)
    wanted = [x, gain, *part.parameters()]
    assert_same(gradients(lambda: part(x, gain=gain), wanted), gradients(lambda: same(x, gain=gain), wanted))
    assert list(net[::-1]) == list(net)[::-1]
    assert list(net[-2:]) == list(net)[-2:]
    with pytest.raises(rg.ProgramError, match=r"no blocks"):
        net[4:]


def test_a_slice_of_what_is_derived():
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, norm_first=True)
    net = rg.from_transformer(nn.TransformerEncoder(layer, 3, norm=nn.LayerNorm(8), enable_nested_tensor=False))
    part = net[:2]
    assert type(part) is rg.ReversibleSequence
    assert part(torch.randn(2, 5, 8)).shape == (2, 5, 8)


# -- routes ------------------------------------------------------------------------------------------------------------


class Gain(nn.Module):
    def __init__(self):
        super().__init__()
        self.fn = mlp()

    def forward(self, x, gain):
        return self.fn(x) * gain


def test_one_pair_routes_a_name_in_all_blocks():
    blocks = [(Gain(), mlp()) for _ in range(3)]
    x, gain = draw(), draw(1, WIDTH)
    short = rg.ReversibleSequence(blocks, route={"gain": (True, False)})
    long = rg.ReversibleSequence(blocks, route={"gain": [(True, False)] * 3})
    wanted = [x, gain, *short.parameters()]
    assert_same(gradients(lambda: short(x, gain=gain), wanted), gradients(lambda: long(x, gain=gain), wanted))
    short.route = {"gain": [True, False]}
    assert short.route == long.route
    for wrong in ((True,), (True, False, True), True, (1, 0)):
        with pytest.raises(rg.ProgramError, match=r"route\['gain'\]"):
            short.route = {"gain": wrong}


MISROUTED = {
    "not given": ((True, False), {}, "update 0: x1 += Gain(x2)", "'gain'"),
    "not given, by name": ({"gain": (True, False)}, {}, "update 0: x1 += Gain(x2)", "'gain'"),
    "to the wrong one": ((True, True), {"gain": 1.0}, "update 1: x2 += Sequential(x1)", "gain"),
    "to the wrong one, by name": (
        {"gain": [(True, False), (True, True)]},
        {"gain": 1.0},
        "update 3: x2 += Sequential(x1)",
        "gain",
    ),
    "under another name": ((True, False), {"gian": 1.0}, "update 0: x1 += Gain(x2)", "gian"),
}


@pytest.mark.parametrize("memory", ["reverse", "store"])
@pytest.mark.parametrize("case", MISROUTED)
def test_a_missing_or_misrouted_side_input(case, memory):
    """The error names the update, the side input and `route`; Python's own is chained."""
    route, side, where, name = MISROUTED[case]
    net = rg.ReversibleSequence([(Gain(), mlp()) for _ in range(2)], route=route, memory=memory, merge=None)
    for act in (lambda: net(draw(), **side), lambda: net.inverse((draw(), draw()), **side)):
        with pytest.raises(rg.ProgramError) as info:
            act()
        assert isinstance(info.value.__cause__, TypeError)
        for word in (name, "route="):
            assert word in str(info.value)
    with pytest.raises(rg.ProgramError) as info:
        net(draw(), **side)
    assert info.value.where == where


@pytest.mark.parametrize("takes", [(), {"strength": "gain"}], ids=["none", "by another name"])
def test_a_side_input_that_an_update_does_not_take(takes):
    """Python's own error says what fn is missing, and a note which update it is and what that takes."""
    updates = [rg.Update("a", mlp(), "b"), rg.Update("b", Gain(), "a", takes)]
    with pytest.raises(TypeError, match=r"gain|strength") as info:
        rg.run(updates, {"a": draw(), "b": draw()}, {"gain": draw()})
    assert info.value.__notes__ == [f"raised by fn in update 1: b += Gain(a), with takes={[*takes]}"]


@pytest.mark.parametrize("takes", [[["gain"], []], [(), {"gain": "gain"}], {"gain": None}, 3, [True]], ids=str)
def test_what_an_update_takes_is_names(takes):
    """A list with an entry for each function, as `rg.wirings.pair` has it, is told from the names for one function."""
    with pytest.raises(rg.ProgramError, match=r"a \+= Gain\(b\): takes holds .* instead of the name of a side input"):
        rg.wirings.leapfrog([Gain(), mlp()], takes=takes)


def test_an_error_of_fn_itself_stays():
    """A TypeError from inside of fn is no question of routes."""

    def fn(x):
        return x + undefined(x, there=1)

    def undefined(x):
        return x

    with pytest.raises(TypeError, match="unexpected keyword argument 'there'"):
        rg.ReversibleSequence([(fn, mlp())])(draw())


def test_a_name_that_is_routed_nowhere():
    with pytest.raises(rg.ProgramError, match=r"'gian'.*routed: gain.*route="):
        rg.ReversibleSequence([(Gain(), mlp())], route={"gain": (True, False)})(draw(), gian=1.0)


def test_a_block_of_three():
    with pytest.raises(rg.ProgramError, match=r"block 1 .*three functions.*\(f, g\).*streams=.*rg\.run"):
        rg.ReversibleSequence([(mlp(), mlp()), (mlp(), mlp(), mlp())])


# -- units of policies -------------------------------------------------------------------------------------------------


def again(make, memory):
    """Numbers of the updates that backward runs again, in a net that `make` builds of functions."""
    log = []
    net, given = make(lambda i: Logged(str(i), log))
    net.memory = memory
    out = net(given)
    (out if isinstance(out, torch.Tensor) else sum(out.values())).sum().backward()
    return sorted(int(run.removesuffix(" again")) for run in log if run.endswith(" again"))


def pairs(fn, depth=4, **options):
    return rg.ReversibleSequence([(fn(2 * i), fn(2 * i + 1)) for i in range(depth)], **options), draw()


def of(wiring, count, names, blocks=4):
    def make(fn):
        updates = [u for i in range(blocks) for u in wiring(*(fn(count * i + k) for k in range(count)))]
        return rg.Reversible(updates), {name: draw() for name in names}

    return make


BLOCKS = {  # updates of a block
    "a sequence": (pairs, 2),
    "a sequence of three streams": (lambda fn: pairs(fn, streams=3), 2),
    "pair": (of(rg.wirings.pair, 2, ["x1", "x2"]), 2),
    "dual": (of(rg.wirings.dual, 4, ["x1", "x2", "m1", "m2"]), 4),
    "groups": (of(lambda *fns: rg.wirings.groups(fns), 3, ["s0", "s1", "s2"]), 3),
    "leapfrog over three": (
        lambda fn: (
            rg.Reversible(rg.wirings.leapfrog([fn(i) for i in range(12)], streams=("a", "b", "c"))),
            {name: draw() for name in "abc"},
        ),
        3,
    ),
}


@pytest.mark.parametrize("case", BLOCKS)
def test_store_last_counts_blocks(case):
    make, size = BLOCKS[case]
    assert again(make, rg.StoreLast(blocks=1)) == list(range(3 * size))
    assert again(make, rg.StoreLast(blocks=3)) == list(range(size))
    assert again(make, rg.StoreLast(blocks=9)) == []
    assert again(make, rg.StoreLast(3)) == again(make, rg.StoreLast(k=3)) == list(range(4 * size - 3))


@pytest.mark.parametrize("case", BLOCKS)
def test_anchor_counts_blocks(case):
    """Streams are kept at the ends of its stretches."""
    make, size = BLOCKS[case]
    program = make(lambda i: Logged(i, []))[0]
    net = program.program if isinstance(program, rg.Reversible) else program._program_for({})
    assert net.blocks == (size,) * 4
    stretches = memory.plan(rg.Anchor(every_blocks=3), net, {"x": draw()})
    assert [count for _, count, _ in stretches] == [3 * size, size]
    assert again(make, rg.Anchor(every_blocks=3)) == list(range(4 * size))
    for updates in (rg.Anchor(5), rg.Anchor(every=5)):
        assert updates.plan((2, 2, 2)) == [("reverse", 5, None), ("reverse", 1, None)]


def test_a_policy_of_your_own():
    class Edges(memory.Policy):
        def plan(self, blocks):
            return [("store", blocks[0], None), ("reverse", sum(blocks[1:-1]), None), ("store", blocks[-1], None)]

    assert again(pairs, Edges()) == [2, 3, 4, 5]


def test_blocks_of_any_list():
    """A block changes no stream twice."""
    f = mlp()
    names = ["e", "a", "b", "a", "b", "b", "a"]
    program = rg.Reversible([rg.Update(name, f, "z") for name in names]).program
    assert program.blocks == (3, 2, 2)
    assert program.inverse().blocks == (2, 2, 3)
    assert copy.deepcopy(program).blocks == program.blocks


@pytest.mark.parametrize(
    "make",
    [
        lambda: rg.StoreLast(),
        lambda: rg.StoreLast(2, blocks=1),
        lambda: rg.StoreLast(blocks=0),
        lambda: rg.StoreLast(blocks=1.5),
        lambda: rg.Anchor(),
        lambda: rg.Anchor(2, every_blocks=1),
        lambda: rg.Anchor(every_blocks=True),
    ],
)
def test_units_are_checked(make):
    with pytest.raises(rg.ProgramError, match=r"must be a whole number|either"):
        make()


def test_policies_print_what_was_said():
    found = [rg.StoreLast(8), rg.StoreLast(blocks=2), rg.Anchor(4), rg.Anchor(every_blocks=2), rg.Budget("1KiB")]
    assert list(map(str, found)) == [
        "StoreLast(k=8)",
        "StoreLast(blocks=2)",
        "Anchor(every=4)",
        "Anchor(every_blocks=2)",
        "Budget(bytes=1024)",
    ]
    assert rg.StoreLast(8) == rg.StoreLast(k=8) != rg.StoreLast(blocks=8)


def test_budget_takes_sizes():
    assert rg.Budget("4GiB") == rg.Budget(4 << 30)
    assert rg.Budget("1.5 kb").bytes == 1500
    assert rg.Budget("auto").bytes == "auto"
    for wrong in ("", "lots", "4 parsecs", "-3GiB", "0", "1.5"):
        with pytest.raises(rg.ProgramError, match=r"rg\.Budget.*\b(size|byte)\b"):
            rg.Budget(wrong)
    assert again(pairs, rg.Budget("1GiB")) == []


# -- nets without data -------------------------------------------------------------------------------------------------

META = ["reverse", "store", "checkpoint", rg.StoreLast(2), rg.Anchor(2), rg.Budget(1 << 30)]


@pytest.mark.parametrize("arithmetic", ["auto", "exact", "float"])
@pytest.mark.parametrize("memory", META, ids=str)
def test_to_meta(memory, arithmetic):
    """Forward, backward and inverse on the meta device, and back to a device with data."""
    net = sequence(memory=memory, arithmetic=arithmetic, merge="cat")
    net(draw())  # what it has noted holds there too
    net = net.to("meta")
    x = draw().detach().to("meta").requires_grad_()
    out = net(x)
    out.sum().backward()
    assert (out.device.type, out.shape) == ("meta", (3, 2 * WIDTH))
    assert {t.grad.device.type for t in (x, *net.parameters())} == {"meta"}
    assert net.inverse(out.detach()).device.type == "meta"
    flat = rg.Reversible(rg.wirings.leapfrog([mlp() for _ in range(3)]), memory=memory, arithmetic=arithmetic).to("meta")
    out = flat({"a": x, "b": x})
    out["a"].sum().backward()
    assert out["b"].device.type == "meta"
    net = net.to_empty(device="cpu")
    for p in net.parameters():
        torch.nn.init.ones_(p)  # whatever was in that memory may be beyond the range of exact arithmetic
    assert net(draw()).device.type == "cpu"
