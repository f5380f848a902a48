"""The examples of se3-transformer-pytorch's README, trained with `retrograde.compat.se3_transformer` and without.

They run with reversal, and some of them without, which is the default.
"""

import pytest
import torch
from support import loss_of

from .systems import MARKS, SYSTEMS, hosts, peer
from .training import assert_trains

pytestmark = MARKS
SE3 = SYSTEMS["se3_transformer"]
COUNT = 5  # points


def floats(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def points(features=None, batch=1):
    """Features, coordinates and a mask."""
    features = floats(batch, COUNT, 8) if features is None else features
    return features, floats(batch, COUNT, 3), torch.ones(batch, COUNT).bool()


def atoms(batch=1):
    return points(torch.randint(0, 28, (batch, COUNT)), batch)


def of_both_types():
    return points({"0": floats(2, COUNT, 8, 1), "1": floats(2, COUNT, 8, 3)}, 2)


def bonds(batch=1):
    return torch.randint(0, 4, (batch, COUNT, COUNT))


def continuous_edges():
    encode = peer("se3_transformer_pytorch.utils").fourier_encode
    return encode(torch.randint(0, 4, (1, COUNT, COUNT, 2)).double(), num_encodings=8, include_self=True)


def chain():
    i = torch.arange(COUNT)
    return (i[:, None] <= (i[None, :] + 1)) & (i[:, None] >= (i[None, :] - 1))


# the arguments of the model, its inputs, and its keyword arguments
FIRST = {"dim": 8, "heads": 8, "depth": 2, "dim_head": 4, "num_degrees": 3, "valid_radius": 10}
REFINED = {"dim": 8, "depth": 2, "input_degrees": 1, "num_degrees": 2, "output_degrees": 2, "reduce_dim_out": True}
EDGES = {"num_tokens": 28, "dim": 8, "num_edge_tokens": 4, "edge_dim": 4, "depth": 2, "input_degrees": 1, "num_degrees": 3}
EXPERIMENTS = {"dim": 8, "depth": 2, "num_degrees": 3, "num_neighbors": 4, "valid_radius": 10, "splits": 4}
SPARSE = {"attend_sparse_neighbors": True, "num_neighbors": 0}
NEIGHBORS = {
    "dim": 8,
    "dim_head": 8,
    "attend_self": True,
    "num_degrees": 3,
    "output_degrees": 2,
    "num_edge_tokens": 4,
    "depth": 3,
}
EXAMPLES = {
    "usage": (FIRST, points, dict),
    "alphafold": (REFINED | {"differentiable_coors": True}, lambda: points(batch=2), lambda: {"return_type": 1}),
    "atoms": (REFINED | {"num_tokens": 28}, atoms, lambda: {"return_type": 1}),
    "positional encoding": (REFINED | {"input_degrees": 2}, of_both_types, lambda: {"return_type": 1}),
    "edges": (EDGES | {"output_degrees": 1, "reduce_dim_out": True}, atoms, lambda: {"edges": bonds(), "return_type": 0}),
    "continuous edges": (
        {"dim": 8, "depth": 1, "attend_self": True, "num_degrees": 2, "output_degrees": 2, "edge_dim": 34},
        points,
        lambda: {"edges": continuous_edges(), "return_type": 1},
    ),
    "sparse neighbors": (FIRST | SPARSE | {"depth": 1, "max_sparse_neighbors": 8}, points, lambda: {"adj_mat": chain()}),
    "neighbors of neighbors": (
        {"dim": 8, "depth": 1, "attend_self": True, "num_degrees": 2, "output_degrees": 2, "num_adj_degrees": 2, "adj_dim": 4}
        | SPARSE,
        points,
        lambda: {"adj_mat": chain(), "return_type": 1},
    ),
    "fibers": (
        EDGES
        | {"hidden_fiber_dict": {0: 8, 1: 6, 2: 4}, "out_fiber_dict": {0: 8, 1: 1}, "reduce_dim_out": False, "output_degrees": 1},
        atoms,
        lambda: {"edges": bonds()},
    ),
    "neighbors": (
        NEIGHBORS | {"num_neighbors": 4, "edge_dim": 2},
        points,
        lambda: {"edges": bonds(), "neighbor_mask": torch.ones(1, COUNT, COUNT).bool(), "return_type": 1},
    ),
    "autoregressive": (FIRST | {"causal": True}, points, dict),
    "linear keys": (EXPERIMENTS | {"linear_proj_keys": True}, points, lambda: {"return_type": 0}),
    "shared keys": (EXPERIMENTS | {"one_headed_key_values": True}, points, lambda: {"return_type": 0}),
    "tied keys": (EXPERIMENTS | {"tie_key_values": True}, points, lambda: {"return_type": 0}),
}


def models(options):
    package = peer("se3_transformer_pytorch.se3_transformer_pytorch")
    return hosts(package, SE3, lambda: package.SE3Transformer(**options).double())


def assert_example_trains(original, ours, inputs, given, reversible=False):
    def loss_of_step(model):
        return loss_of(model(*inputs(), **given())) / COUNT

    assert_trains(original, ours, [loss_of_step] * 2, lr=1e-4, reversible=reversible)


@pytest.mark.parametrize("example", EXAMPLES)
def test_example(example):
    options, inputs, given = EXAMPLES[example]
    original, ours = models(options | {"reversible": True})
    if example == "fibers":  # of different widths: the original cannot join them
        with pytest.raises(RuntimeError, match="Sizes of tensors must match"):
            original(*inputs(), **given())
        original = None
    assert_example_trains(original, ours, inputs, given, reversible=True)


@pytest.mark.parametrize("example", ["usage", "atoms", "fibers"])
def test_example_without_reversal(example):
    options, inputs, given = EXAMPLES[example]
    assert_example_trains(*models(options), inputs, given)


def test_global_nodes():
    """The package refuses them beside `reversible=True`."""
    options = {"dim": 8, "depth": 1, "num_degrees": 2, "num_neighbors": 4, "valid_radius": 10, "global_feats_dim": 4}
    assert_example_trains(*models(options), points, lambda: {"return_type": 0, "global_feats": floats(1, 1, 4)})
