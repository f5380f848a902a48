"""What these tests share."""

import contextlib

import pytest
import torch
from support import WIDTH, loss_of, rg
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

SETTINGS = {  # dtype of the net and its streams, dtype of autocast
    "float32": (torch.float32, None),
    "bfloat16": (torch.bfloat16, None),
    "float16": (torch.float16, None),
    "float64": (torch.float64, None),
    "bf16 autocast": (torch.float32, torch.bfloat16),
    "fp16 autocast": (torch.float32, torch.float16),
}
FLOATS = {name: setting for name, setting in SETTINGS.items() if name != "float64"}
SHORT = [name for name in SETTINGS if name not in ("float32", "float64")]
LIMIT, GRID, FINE = 32766.0, 2.0**-24, 2.0**-35
ROWS = 4
DRIFTS = pytest.mark.filterwarnings("ignore:.* slightly different")

MEMORIES = ["reverse", "checkpoint", rg.StoreLast(2), rg.Budget(5000), rg.Anchor(3)]  # the budget is enough for some updates

every_setting = pytest.mark.parametrize("setting", SETTINGS)
every_policy = pytest.mark.parametrize("memory", MEMORIES, ids=str)
store_too = pytest.mark.parametrize("memory", ["store", *MEMORIES], ids=str)


# -- programs, and one way to compare them -----------------------------------------------------------------------------


class Fn(nn.Module):
    """A branch of any number of sources and a context, with dropout, and with BatchNorm where asked."""

    def __init__(self, to=WIDTH, *widths, dropout=0.2, norm=nn.LayerNorm):
        super().__init__()
        self.norms = nn.ModuleList(norm(width) for width in widths or (to,))
        self.lifts = nn.ModuleList(nn.Linear(width, 2 * to) for width in widths or (to,))
        self.drop, self.out = nn.Dropout(dropout), nn.Linear(2 * to, to)

    def forward(self, *sources, context=None):
        hidden = sum(lift(norm(x)) for lift, norm, x in zip(self.lifts, self.norms, sources, strict=True))
        return self.out(self.drop((hidden if context is None else hidden * context.cos()).tanh()))


def draw(*shape, dtype=torch.float32, grad=True):
    return torch.randn(*(shape or (ROWS, WIDTH))).to(dtype).requires_grad_(grad)


def cast(value, dtype):
    """New leaves of another dtype."""
    return tree_map(lambda t: t.detach().to(dtype).requires_grad_(t.requires_grad) if t.is_floating_point() else t, value)


def amp(dtype):
    return contextlib.nullcontext() if dtype is None else torch.autocast("cpu", dtype)


class Case:
    """A program with its inputs. `fns` are what it has parameters in, if that is not in its updates."""

    def __init__(self, setting, updates, streams, side=None, fns=None):
        dtype, self.autocast = SETTINGS[setting]
        self.updates, self.streams, self.side = updates, cast(streams, dtype), cast(side or {}, dtype)
        modules = [u.fn for u in updates if isinstance(u.fn, nn.Module)] if fns is None else fns
        self.fns = nn.ModuleList(dict.fromkeys(modules)).to(dtype)

    @property
    def wanted(self):
        return [t for t in (*tree_leaves((self.streams, self.side)), *self.fns.parameters()) if t.requires_grad]

    def out(self, memory, arithmetic="exact", way=rg.run):
        with amp(self.autocast):
            return way(self.updates, self.streams, self.side, memory=memory, arithmetic=arithmetic)

    def observed(self, memory, arithmetic="exact", way=rg.run):
        """Outputs, gradients of all that has some (None stays None), buffers and the random state afterwards."""
        before = [b.clone() for b in self.fns.buffers()]
        found = observed(lambda: self.out(memory, arithmetic, way), self.wanted)
        found += [b.clone() for b in self.fns.buffers()]
        for b, value in zip(self.fns.buffers(), before, strict=True):
            b.copy_(value)
        return found


def observed(make, wanted, device="cpu"):
    """Outputs, gradients and the random state of the device afterwards."""
    torch.manual_seed(1)
    out = make()
    loss = loss_of([t.double() for t in tree_leaves(out) if t.is_floating_point()])
    found = torch.autograd.grad(loss, wanted, allow_unused=True)
    return [*(t.detach() for t in tree_leaves(out)), *found, torch.rand(3, device=device)]


def same(a, b):
    """The same numbers in the same dtype, NaN for NaN, None for None."""
    if a is None or b is None:
        return a is b
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(a, b) or (torch.equal(a.isnan(), b.isnan()) and torch.equal(a[~a.isnan()], b[~b.isnan()]))


def assert_equal(found, true):
    assert len(found) == len(true)
    assert sum(t is not None and bool(t.any()) for t in true[:-1]) > 1, "nothing to compare"
    apart = [i for i, (a, b) in enumerate(zip(found, true, strict=True)) if not same(a, b)]
    assert not apart, f"{len(apart)} of {len(true)} tensors differ, the first is {apart[0]} of {true[apart[0]].shape}"


class Recovered:
    """What every fn is given in its first and in its second run: `apart` counts the updates where that is not the same."""

    def __init__(self):
        self.first, self.seen, self.apart = {}, 0, 0

    def __call__(self, index, update, sources, out):
        key, given = (index, id(update)), [t.detach().clone() for t in tree_leaves(sources)]
        if not rg.replaying():
            self.first[key] = given
            return
        self.seen += 1
        self.apart += not all(map(self.bits, self.first[key], given))

    @staticmethod
    def bits(a, b):
        """Equal, the signs of zeros and the layout too."""
        return same(a, b) and torch.equal(torch.signbit(a), torch.signbit(b)) and a.stride() == b.stride()


def exact(case, memory, recovered=None, way=rg.run):
    """Both are under exact arithmetic: a policy, and ordinary autograd."""
    found = case.observed(memory, way=way)
    if recovered is not None:
        assert recovered.seen
        assert recovered.apart == 0, f"recovered other sources for {recovered.apart} of {recovered.seen} updates"
    assert_equal(found, case.observed("store", way=way))
    return found


def wired(name, setting, depth, make=Fn):
    """Blocks of a wiring, every fn with the context."""
    takes, narrow = "context", 4
    block = {
        "pair": lambda: rg.wirings.pair(make(), make(), takes=[takes] * 2),
        "dual": lambda: rg.wirings.dual(make(), make(), make(narrow), make(narrow), takes=[takes] * 4),
        "cross": lambda: rg.wirings.cross(
            make(WIDTH, WIDTH, narrow), make(narrow), make(narrow, narrow, WIDTH), make(), takes=[takes] * 4
        ),
        "leapfrog": lambda: rg.wirings.leapfrog([make(), make(), make()], takes=takes),
        "three in turn": lambda: rg.wirings.leapfrog([make(), make(), make()], streams=("a", "b", "c"), takes=takes),
        "groups": lambda: rg.wirings.groups([make(), make(), make()], takes=takes),
    }[name]
    updates = [update for _ in range(depth) for update in block()]
    names = dict.fromkeys(u.target for u in updates)
    streams = {name: draw(ROWS, narrow if name.startswith("m") else WIDTH) for name in names}
    return Case(setting, updates, streams, {"context": draw(ROWS, 1)})


def sequence(depth, memory, arithmetic="exact"):
    return rg.ReversibleSequence([(Fn(), Fn()) for _ in range(depth)], memory=memory, arithmetic=arithmetic)


class Casts(Fn):
    """Autocast that cannot be seen from outside."""

    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(x)


def hidden(fn=None):
    return rg.wirings.leapfrog([Fn(), Fn(), fn or Casts(), Fn()]), {"a": draw(), "b": draw()}
