"""Two gloo processes on the CPU: every case compares the gradients of all parameters with one process, over two steps."""

from __future__ import annotations

import copy
import itertools
import sys
import traceback
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from offload_support import LateLink
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP

import retrograde as rg
from retrograde._memory import link, offload
from retrograde.compat import nuwa

WIDTH, WORLD = 8, 2
link.MAKE["cpu"], offload.SMALL = LateLink, 0


def branch():
    return nn.Sequential(
        nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Dropout(0.2), nn.Linear(2 * WIDTH, WIDTH)
    )


class WithContext(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.mix = branch(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x, context):
        return self.body(x + self.mix(context))


class Layer(nn.Module):
    """An ordinary residual layer."""

    def __init__(self, make):
        super().__init__()
        self.f, self.g = make(), make()

    def forward(self, x, **side):
        x = x + self.f(x, **side)
        return x + self.g(x, **side)


class Model(nn.Module):
    """Embedding, blocks, head; as a case wants it, ordinary layers, with a context from an encoder, shared or unused weights."""

    def __init__(self, context=False, shared=False, unused=False, drop_in=False, ordinary=False, bits=None):
        super().__init__()
        make = WithContext if context else branch
        self.first = nn.Linear(WIDTH, WIDTH)
        self.encoder = nn.Linear(WIDTH, WIDTH) if context else None
        blocks = [(make(), make()) for _ in range(1 if shared else 3)] * (3 if shared else 1)
        if ordinary:
            self.net = rg.Sequential([Layer(make) for _ in range(4)], bits=bits, memory="store")
        elif drop_in:
            self.net = nuwa.ReversibleSequence(blocks, {"context": [(context, context)] * 3})
        else:
            self.net = rg.ReversibleSequence(blocks, route=(context, context))
        self.spare = nn.Linear(WIDTH, WIDTH) if unused else None
        self.last = nn.Linear(WIDTH, 1)

    def forward(self, x):
        side = {} if self.encoder is None else {"context": self.encoder(x.sin()).tanh()}
        return self.last(self.net(self.first(x), **side)).square().mean()


def batch(rank, step):
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(4, WIDTH, generator=generator)


def one_process(model, steps, accumulate=1):
    """Gradients of each step by ordinary autograd, averaged over what each process would do."""
    model.net.memory = "store"
    found = []
    for step in range(steps):
        model.zero_grad()
        for part in range(accumulate):
            for rank in range(WORLD):
                torch.manual_seed(77 + 10 * (step * accumulate + part) + rank)
                (model(batch(rank, step * accumulate + part)) / WORLD).backward()
        found.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
        sgd(model)
    return found


def sgd(model):
    with torch.no_grad():
        for p in model.parameters():
            if p.grad is not None:
                p -= 0.1 * p.grad


def several(wrapped, model, steps, rank, accumulate=1):
    found = []
    for step in range(steps):
        wrapped.zero_grad()
        for part in range(accumulate):
            quiet = wrapped.no_sync() if part < accumulate - 1 else nullcontext()
            with quiet:
                torch.manual_seed(77 + 10 * (step * accumulate + part) + rank)
                wrapped(batch(rank, step * accumulate + part)).backward()
        whole = {n: p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad for n, p in model.named_parameters()}
        found.append({name: g.clone() for name, g in whole.items() if g is not None})
        sgd(model)
    return found


def compare(found, true, tolerance):
    for step, (a, b) in enumerate(zip(found, true, strict=True)):
        assert a.keys() >= b.keys(), f"step {step}: no gradients for {b.keys() - a.keys()}"
        for name in a:
            reference = b.get(name, torch.zeros_like(a[name]))
            error = (a[name].float() - reference.float()).norm() / reference.norm().clamp(min=1e-3)
            assert error < tolerance, f"step {step}: {name}: relative error {error:.1e}"
        assert any(g.norm() > 1e-3 for g in b.values())


def ddp(rank, memory, accumulate=1, options=None, **kind):
    torch.manual_seed(0)
    model = Model(**kind)
    true = one_process(copy.deepcopy(model), 2, accumulate)
    model.net.memory = memory
    compare(several(DDP(model, **(options or {})), model, 2, rank, accumulate), true, 1e-4)


def sharded(rank, memory, where, policy=None, **kind):
    torch.manual_seed(0)
    model = Model(**kind)
    true = one_process(copy.deepcopy(model), 2)
    if policy is not None:  # other numbers than in float32: compared with ordinary autograd under the same sharding
        plain = shard(copy.deepcopy(model), where, policy)
        plain.net.memory = "store"
        true = several(plain, plain, 2, rank)
    model.net.memory = memory
    model = shard(model, where, policy)
    compare(several(model, model, 2, rank), true, 1e-4 if policy is None else 5e-2)  # streams in bf16 drift


def stepping_inside(rank, memory):
    """The optimizer inside backward, before gradients are averaged: refused, and no weight has moved."""
    torch.manual_seed(0)
    model = Model()
    model.net.memory = memory
    before = [p.detach().clone() for p in model.parameters()]
    wrapped = DDP(model)
    with rg.step_in_backward(torch.optim.SGD(model.parameters(), 0.1)):
        with pytest.raises(rg.ProgramError, match="DistributedDataParallel averages gradients"):
            wrapped(batch(rank, 0)).backward()
    assert all(map(torch.equal, before, model.parameters()))


def shard(model, where, policy):
    options = {"mesh": init_device_mesh("cpu", (WORLD,))} | ({} if policy is None else {"mp_policy": policy})
    for block in getattr(model.net, "blocks", model.net) if where != "root" else ():
        if where == "fns":
            fully_shard(block.f, **options)
            fully_shard(block.g, **options)
        elif where == "pairs":
            fully_shard([block.f, block.g], **options)
        else:
            fully_shard(block, **options)
    return fully_shard(model, **options)


def of_layers(memory):
    """Ordinary layers cannot be undone."""
    return rg.StoreLast(blocks=2) if memory == "reverse" else memory


HALF = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
CASES = {
    "ddp": lambda rank, memory: ddp(rank, memory),
    "ddp, unused parameters": lambda r, m: ddp(r, m, options={"find_unused_parameters": True}, unused=True),
    "ddp, static graph": lambda r, m: ddp(r, m, options={"static_graph": True}),
    "ddp, shared weights": lambda r, m: ddp(r, m, shared=True),
    "ddp, shared weights, unused": lambda r, m: ddp(r, m, shared=True, unused=True, options={"find_unused_parameters": True}),
    "ddp, context": lambda r, m: ddp(r, m, context=True),
    "ddp, no_sync": lambda r, m: ddp(r, m, accumulate=2, context=True),
    "ddp, drop-in": lambda r, m: ddp(
        r, m, drop_in=True, shared=True, unused=True, context=True, options={"find_unused_parameters": True}
    ),
    "fsdp, root": lambda r, m: sharded(r, m, "root"),
    "fsdp, each fn": lambda r, m: sharded(r, m, "fns"),
    "fsdp, f and g": lambda r, m: sharded(r, m, "pairs"),
    "fsdp, each block": lambda r, m: sharded(r, m, "blocks"),
    "fsdp, context": lambda r, m: sharded(r, m, "fns", context=True),
    "fsdp, context, each block": lambda r, m: sharded(r, m, "blocks", context=True),
    "fsdp, mixed precision": lambda r, m: sharded(r, m, "fns", policy=HALF, context=True),
    "ddp, the optimizer inside backward": stepping_inside,
    "fsdp, mixed precision, each block": lambda r, m: sharded(r, m, "blocks", policy=HALF),
    "ddp, ordinary layers": lambda r, m: ddp(r, of_layers(m), context=True, ordinary=True),
    "fsdp, ordinary layers": lambda r, m: sharded(r, of_layers(m), "blocks", context=True, ordinary=True),
    "fsdp, mixed precision, ordinary layers": lambda r, m: sharded(r, of_layers(m), "blocks", policy=HALF, ordinary=True),
    "ddp, noise": lambda r, m: ddp(r, m, context=True, ordinary=True, bits=4),
    "ddp, noise, no_sync": lambda r, m: ddp(r, m, accumulate=2, ordinary=True, bits=4),
    "fsdp, noise": lambda r, m: sharded(r, m, "blocks", context=True, ordinary=True, bits=4),
    "fsdp, mixed precision, noise": lambda r, m: sharded(r, m, "blocks", policy=HALF, ordinary=True, bits=4),
    "fsdp, mixed precision, root": lambda r, m: sharded(r, m, "root", policy=HALF),
}
OTHERS = {"checkpoint": "checkpoint", "offload": "offload", "StoreLast(2)": rg.StoreLast(2), "Budget": rg.Budget(8000)}
POLICIES = {"reverse": "reverse", **OTHERS}
RUNS = [(case, "reverse") for case in CASES] + list(zip(CASES, itertools.cycle(OTHERS)))  # each other policy in every fourth case


def main(rank, file):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=WORLD)
    for name, policy in RUNS:
        try:
            CASES[name](rank, POLICIES[policy])
            error = None
        except Exception:
            error = traceback.format_exc()
        errors = [None] * WORLD
        dist.all_gather_object(errors, error)
        if rank == 0:
            first = next((e for e in errors if e), None)
            print("CASE", f"{name} [{policy}]", "ok" if first is None else "failed", flush=True)
            if first:
                print(first, flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
