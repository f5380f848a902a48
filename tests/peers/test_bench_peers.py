"""The packages that `retrograde bench` compares with are wired as the same net: same parameters, same gradients, less memory."""

import pytest
from torch import nn

from retrograde.bench import worker
from retrograde.bench.compare import Found, Measured, compare_gradients, versions
from retrograde.bench.variants import PEERS, variants

from .systems import MARKS, peer

pytestmark = MARKS
SETTING = {"device": "cpu", "dim": 16, "heads": 2, "shape": [2, 64, 16], "depth": [8], "dtype": "float64", "autocast": "none"}
SETTING |= {"block": None, "rounds": 2, "seed": 0, "timeout": 100, "profile": False}


def measured(name, **setting):
    variant = next(v for v in variants({}) if v.name == name)
    found = worker.outcome({"setting": SETTING | setting, "variant": variant.as_dict(), "depth": 8})
    gradients, same = found.pop("gradients", {}), found.pop("same", "")
    return Measured(Found(8, name, **found), gradients, same)


@pytest.mark.parametrize("name", PEERS)
def test_the_same_net(name):
    peer(PEERS[name])
    ordinary, theirs = compare_gradients([measured("ordinary"), measured(name)])
    assert theirs.failed is None, theirs.detail
    assert theirs.gradient_error < 1e-12
    assert theirs.activation_bytes < ordinary.activation_bytes / 2
    assert versions()[PEERS[name]]


@pytest.mark.parametrize("name", PEERS)
def test_other_shapes(name):
    peer(PEERS[name])
    flat = {"shape": [32, 16], "block": f"{__name__}:linears"}
    _, theirs = compare_gradients([measured("ordinary", **flat), measured(name, **flat)])
    if name == "reformer":
        assert theirs.detail == "ValueError: reformer-pytorch takes inputs of 3 dims, not 2"
    else:
        assert theirs.gradient_error < 1e-12


def linears(dim):
    return nn.Sequential(nn.Linear(dim, dim), nn.Tanh()), nn.Linear(dim, dim)
