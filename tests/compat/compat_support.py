"""What these tests share."""

from dataclasses import dataclass, field
from typing import Any

import torch
from support import WIDTH, Attend, draw, mlp
from torch import nn

from retrograde.compat import axial_attention, nuwa, nuwa_video_audio, reformer, se3_transformer

SELF, CROSS, INTER = nuwa_video_audio.BLOCKS
TYPES = (SELF, CROSS, INTER)


class Look(nn.Module):
    """Attention over a context, or over itself, with both masks, and dropout."""

    def __init__(self, dropout=0.0):
        super().__init__()
        self.attend, self.drop = Attend(), nn.Dropout(dropout)

    def forward(self, x, context=None, mask=None, context_mask=None):
        out = self.drop(self.attend(x, context, None if context_mask is None else context_mask[:, None]))
        return out if mask is None else out * mask[..., None]


class Turned(nn.Module):
    """A function on channels first."""

    def __init__(self, fn):
        super().__init__()
        self.fn = fn

    def forward(self, x, **side):
        return self.fn(x.transpose(1, 2), **side).transpose(1, 2)


class Each(nn.Module):
    """A function of a dict: other functions for other keys, in the reversed order, with a key too many."""

    def __init__(self, make):
        super().__init__()
        self.fns = nn.ModuleDict({"1": make(), "0": make()})

    def forward(self, x, **side):
        out = {key: fn(x[key].flatten(1, -2), **side).view_as(x[key]) for key, fn in self.fns.items()}
        return {"extra": out["0"].sum(), **out}


@dataclass
class System:
    """A net with its inputs, and the same by hand: plain PyTorch on the functions inside the net."""

    net: Any
    inputs: tuple
    side: dict
    by_hand: Any
    route: dict = field(default_factory=dict)  # arguments of forward that are no side inputs

    def __call__(self):
        return self.net(*self.inputs, **self.side, **self.route)

    def hand(self):
        return self.by_hand(self.net, self.inputs, self.side)

    @property
    def wanted(self):
        leaves = torch.utils._pytree.tree_leaves((self.inputs, self.side))
        return [t for t in leaves if isinstance(t, torch.Tensor) and t.requires_grad] + list(self.net.parameters())

    def with_context(self, context):
        return System(self.net, self.inputs, self.side | {"context": context}, self.by_hand, self.route)


def pairs_by_hand(blocks, x1, x2, f_args, g_args):
    for block in blocks:
        x1 = x1 + block.f.net(x2, **f_args)
        x2 = x2 + block.g.net(x1, **g_args)
    return x1, x2


def a_reformer(depth, make, **options):
    def by_hand(net, inputs, side):
        return torch.cat(pairs_by_hand(net.blocks, *inputs[0].chunk(2, 2), side, side), 2)

    net = reformer.ReversibleSequence([(make(), make()) for _ in range(depth)], **options)
    return System(net, (draw(2, 5, 2 * WIDTH),), {"context": draw(2, 4, WIDTH)}, by_hand, {"arg_route": (True, True)})


def an_axial(depth, make, **options):
    def by_hand(net, inputs, side):
        x1, x2 = pairs_by_hand(net.blocks, *inputs * 2, side, side)
        return (x1 + x2) / 2

    net = axial_attention.ReversibleSequence([(Turned(make()), Turned(make())) for _ in range(depth)], **options)
    return System(net, (draw(2, WIDTH, 5),), {"context": draw(2, 4, WIDTH)}, by_hand)


def an_se3(depth, make, **options):
    def by_hand(net, inputs, side):
        x1, x2 = dict(inputs[0]), dict(inputs[0])
        for block in net.blocks:
            out = block.f.net(x2, **side)
            x1 = {key: x1[key] + out[key] for key in x1}
            out = block.g.net(x1)
            x2 = {key: x2[key] + out[key] for key in x2}
        return {key: (x1[key] + x2[key]) / 2 for key in x1}

    net = se3_transformer.ReversibleSequence([(Each(make), Each(make)) for _ in range(depth)], **options)
    return System(net, ({"0": draw(2, 5, WIDTH), "1": draw(2, 3, 2, WIDTH)},), {"context": draw(2, 4, WIDTH)}, by_hand)


def a_nuwa(depth, make, **options):
    route = {
        "context": [(i > 0, i < 2) for i in range(depth)],
        "mask": [(True, False)] * depth,
        "nobody": [(False, False)] * depth,
    }

    def by_hand(net, inputs, side):
        x1, x2 = inputs * 2
        for i, block in enumerate(net.blocks):
            x1 = x1 + block.f.net(x2, mask=side["mask"], **({"context": side["context"]} if i > 0 else {}))
            x2 = x2 + block.g.net(x1, **({"context": side["context"]} if i < 2 else {}))
        return x1 + x2

    net = nuwa.ReversibleSequence([(make(), make()) for _ in range(depth)], route, **options)
    side = {"context": draw(2, 4, WIDTH), "mask": torch.rand(2, 5) > 0.3, "nobody": 1, "strange": object()}
    return System(net, (draw(2, 5, WIDTH),), side, by_hand)


def a_dual(depth, make, **options):
    def by_hand(net, inputs, side):
        (x1, m1), (x2, m2) = inputs, inputs
        video, audio = side["video_mask"], side["audio_mask"]
        context = {"context": side["context"], "context_mask": side["context_mask"]}
        for kind, block in zip(net.block_types, net.blocks, strict=True):
            f, g, j, k = block.f.net, block.g.net, block.j.net, block.k.net
            if kind == INTER:
                x1 = x1 + f(x2, m2, mask=video, context_mask=audio)
                x2 = x2 + k(x1)
                m1 = m1 + j(m2, x2, mask=audio, context_mask=video)
                m2 = m2 + g(m1)
            else:
                x1 = x1 + (f(x2, **context, mask=video) if kind == CROSS else f(x2))
                x2 = x2 + g(x1)
                m1 = m1 + (j(m2, **context, mask=audio) if kind == CROSS else j(m2))
                m2 = m2 + k(m1)
        return [(x1 + x2) / 2, (m1 + m2) / 2]

    types = [TYPES[(i + 1) % 3] for i in range(depth)]
    net = nuwa_video_audio.DualModalityReversibleSequence([[make() for _ in range(4)] for _ in types], types, **options)
    masks = {name: torch.rand(2, n) > 0.3 for name, n in (("context_mask", 4), ("video_mask", 5), ("audio_mask", 3))}
    for mask in masks.values():
        mask[:, 0] = True
    return System(net, (draw(2, 5, WIDTH), draw(2, 3, WIDTH)), {"context": draw(2, 4, WIDTH), **masks}, by_hand)


SYSTEMS = {
    "reformer": a_reformer,
    "axial_attention": an_axial,
    "se3_transformer": an_se3,
    "nuwa": a_nuwa,
    "nuwa_video_audio": a_dual,
}


def build(system, depth=3, dropout=0.0, make=None, **options):
    return SYSTEMS[system](depth, make or (lambda: Look(dropout)), **options)


# -- reformer ----------------------------------------------------------------------------------------------------------


class Told(nn.Module):
    """Writes down the signals it gets."""

    def __init__(self, log, name):
        super().__init__()
        self.fn, self.log, self.name = mlp(), log, name

    def forward(self, x, **signals):
        self.log.append((self.name, signals.get("_reverse"), signals.get("_depth")))
        return self.fn(x)


def both_halves(length=5):
    return draw(2, length, 2 * WIDTH)


# -- bad input ---------------------------------------------------------------------------------------------------------

f, X = mlp(), torch.rand(2, 5, WIDTH, dtype=torch.float64)
