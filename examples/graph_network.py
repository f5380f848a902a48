"""A deep graph network with grouped updates, as in RevGNN: which community does each node belong to?

The channels of the nodes are split into groups, one stream for each, and `rg.wirings.groups` updates them one after the other:
s0 += f0(s1 + s2 + …), s1 += f1(s0), s2 += f2(s1), … The graph goes to every function as a side input. Few nodes have a label,
and what a node knows of itself is mostly noise: the network must look at many neighbours.

    python examples/graph_network.py                        # about half a minute on two CPU cores
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import retrograde as rg
from retrograde.bench.meter import LiveBytes
from retrograde.bench.report import size
from retrograde.memory import Memory


def communities(nodes: int, kinds: int = 4, degree: int = 8, features: int = 16) -> tuple[Tensor, Tensor, Tensor]:
    """Noisy features of the nodes, edges that are mostly within a community (sources, targets), and the communities."""
    label = torch.randint(kinds, (nodes,))
    tried = torch.randint(nodes, (2, nodes * degree * 2))
    same = label[tried[0]] == label[tried[1]]
    edges = tried[:, torch.rand(tried.shape[1]) < torch.where(same, 0.8, 0.08)]
    known = torch.randn(kinds, features)[label] * 0.3
    return known + torch.randn(nodes, features), torch.cat((edges, edges.flip(0)), dim=1), label


class Neighbours(nn.Module):
    """A norm, the mean over the neighbours beside the node itself, and a linear layer."""

    def __init__(self, width: int):
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(width), nn.Linear(2 * width, width)

    def forward(self, x_ND: Tensor, edges: Tensor) -> Tensor:
        x_ND = self.norm(x_ND).relu()
        source, target = edges
        count_N1 = x_ND.new_zeros(len(x_ND), 1).index_add(0, target, x_ND.new_ones(len(target), 1))
        mean_ND = torch.zeros_like(x_ND).index_add(0, target, x_ND[source]) / count_N1.clamp(min=1)
        return self.mix(torch.cat((x_ND, mean_ND), dim=1))


class GraphNetwork(nn.Module):
    def __init__(self, features: int, width: int, groups: int, depth: int, kinds: int):
        super().__init__()
        self.names = [f"s{i}" for i in range(groups)]
        self.first, self.last = nn.Linear(features, width), nn.Sequential(nn.LayerNorm(width), nn.Linear(width, kinds))
        blocks = [[Neighbours(width // groups) for _ in self.names] for _ in range(depth)]
        self.net = rg.Reversible([update for fns in blocks for update in rg.wirings.groups(fns, takes="edges")])

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        parts = self.first(x).chunk(len(self.names), dim=1)
        out = self.net(dict(zip(self.names, parts, strict=True)), edges=edges)
        return self.last(torch.cat([out[name] for name in self.names], dim=1))


def activations(model: GraphNetwork, x: Tensor, edges: Tensor, memory: Memory) -> int:
    """Bytes at the peak of a training step, over parameters and gradients."""
    model.net.memory = memory
    model.zero_grad(set_to_none=False)  # gradients are there already, so they do not count
    with LiveBytes() as meter:
        model(x, edges).square().mean().backward()
    return meter.peak


def main(argv: Sequence[str] | None = None) -> list[float]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--depth", type=int, default=16, help="blocks; each updates every group once")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--groups", type=int, default=4)
    parser.add_argument("--nodes", type=int, default=2000)
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args(argv)
    torch.manual_seed(0)
    x, edges, label = communities(options.nodes)
    told = torch.rand(options.nodes) < 0.1  # one node in ten has a label
    model = GraphNetwork(x.shape[1], options.width, options.groups, options.depth, kinds=4)
    print(f"{options.nodes} nodes, {edges.shape[1]} edges, {len(model.net.program.updates)} updates")
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses: list[float] = []
    for step in range(1, options.steps + 1):
        loss = cross_entropy(model(x, edges)[told], label[told])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if step % max(options.steps // 6, 1) == 0:
            print(f"step {step:>4}  loss {losses[-1]:.3f}")
    with torch.no_grad():
        right = (model(x, edges).argmax(1) == label)[~told].float().mean()
    print(f"right on nodes without a label: {right:.0%}")
    for memory in ("store", "checkpoint", "reverse"):
        print(f"activations of a step under {memory:<10} {size(activations(model, x, edges, memory)):>10}")
    return losses


if __name__ == "__main__":
    main()
