"""Exact arithmetic under torch.compile and FSDP."""

import re
import subprocess
import sys

import pytest
import torch
from exact_support import Case, Fn, amp, assert_equal, draw, exact, observed, sequence
from support import environment, rg

# -- torch.compile, FSDP -----------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore")  # of the compiler's own
@pytest.mark.parametrize("setting", ["bf16 autocast", "bfloat16"])
def test_compiled_fns(setting):
    torch._dynamo.reset()
    fns = [Fn(dropout=0.0) for _ in range(4)]
    updates = rg.wirings.leapfrog([torch.compile(fn, backend="aot_eager") for fn in fns])
    case = Case(setting, updates, {"a": draw(), "b": draw()}, fns=fns)
    exact(case, "reverse")
    exact(case, rg.StoreLast(2))
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore")
def test_compiled_around():
    """The whole model, dropout included."""
    torch._dynamo.reset()
    net = sequence(2, "reverse")
    around = torch.compile(lambda x: net(x * 2).sin(), backend="aot_eager")
    x, results = draw(), []
    for net.memory in ("reverse", "store"):
        with amp(torch.bfloat16):
            results.append(observed(lambda: around(x), [x, *net.parameters()]))
    assert_equal(*results)
    torch._dynamo.reset()


SHARDED = ["fns", "pairs", "blocks", "root"]


def sharded(rank, file):
    """One of two gloo processes: under bf16 by FSDP2's mixed precision, the default is exact, and equal to store to the bit."""
    from distributed_worker import HALF, WORLD, Model, several, shard

    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=WORLD)
    for where in SHARDED:
        found = {}
        for memory, arithmetic in (("reverse", "auto"), ("store", "auto"), ("store", "exact"), ("reverse", "float")):
            torch.manual_seed(0)
            model = shard(Model(context=True), where, HALF)
            model.net.memory, model.net.arithmetic = memory, arithmetic
            grads = several(model, model, 2, rank)
            found[memory, arithmetic] = [step[name] for step in grads for name in sorted(step)]
        mine = found.pop(("reverse", "auto"))
        equal = {f"{m} {a}": all(map(torch.equal, mine, other)) for (m, a), other in found.items()}
        if rank == 0:
            print("CASE", where, equal, flush=True)
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def sharding(tmp_path_factory):
    """What both processes found, by where the net was sharded."""
    command = [sys.executable, __file__]
    file = str(tmp_path_factory.mktemp("gloo") / "rendezvous")
    env = environment()
    other = subprocess.Popen([*command, "1", file], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=env)
    try:
        done = subprocess.run([*command, "0", file], capture_output=True, text=True, timeout=120, check=False, env=env)
    finally:
        other.kill()
        other.wait()
    return dict(re.findall(r"^CASE (\w+) (.*)$", done.stdout, flags=re.MULTILINE)), done.stderr[-2000:]


@pytest.mark.parametrize("where", SHARDED)
def test_mixed_precision_of_fsdp(sharding, where):
    found, stderr = sharding
    assert found.get(where) == str({"store auto": True, "store exact": True, "reverse float": False}), stderr


if __name__ == "__main__":
    sharded(int(sys.argv[1]), sys.argv[2])
