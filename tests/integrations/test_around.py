"""What goes around a reversible model of Hugging Face: DDP, FSDP2 and torch.compile, in one process."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from retrograde.integrations.transformers import reversible_

from . import zoo
from .test_transformers import assert_same, gradients_of

pytestmark = [pytest.mark.integrations, pytest.mark.filterwarnings("ignore")]


@pytest.fixture
def group(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.fixture
def given():
    model = reversible_(zoo.made(zoo.llama)).eval()
    batch = zoo.batch_for(model)
    return model, batch, gradients_of(model, batch)


def test_ddp(group, given):
    model, batch, true = given
    found = gradients_of(torch.nn.parallel.DistributedDataParallel(copy.deepcopy(model)), batch)
    assert_same({name.removeprefix("module."): value for name, value in found.items()}, true)


def test_fully_shard_on_layers(group, given):
    """The parts of a layer run inside its hooks, which gather the parameters."""
    model, batch, true = given
    sharded = copy.deepcopy(model)
    for layer in sharded.model.layers:
        fully_shard(layer, mesh=group)
    fully_shard(sharded, mesh=group)
    found = gradients_of(sharded, batch)
    assert_same({name: value.full_tensor() if hasattr(value, "full_tensor") else value for name, value in found.items()}, true)


@pytest.mark.parametrize("fullgraph", [False, True])
def test_compile(given, fullgraph):
    model, batch, true = given
    torch.compiler.reset()
    model.zero_grad()
    out = torch.compile(model, backend="aot_eager", fullgraph=fullgraph)(**batch)
    out.loss.backward()
    found = {"loss": out.loss.detach(), "logits": out.logits.detach()}
    assert_same(found | {name: p.grad for name, p in model.named_parameters()}, true)
