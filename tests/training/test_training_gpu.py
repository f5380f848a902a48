"""The same run on a CUDA device. Kernels with atomic additions give other last bits each time, so losses are compared closely."""

from dataclasses import replace

import pytest
from training_support import losses, tiny, trained

from retrograde.training.loop import build, train
from retrograde.training.memory import kept_by

pytestmark = pytest.mark.gpu
CUDA = {"device": "cuda", "width": 64, "context": 64, "lr": 1e-3}


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"precision": "float32"},
        {"step_in_backward": True},
        {"accumulate": 2},
        {"compile": True},
        {"dropout": 0.2},
        {"dropout": 0.2, "compile": True},
    ],
)
@pytest.mark.filterwarnings("ignore")  # of torch's compiler
def test_reverse_follows_store(tmp_path, more):
    found = [trained(tmp_path / memory, memory=memory, **CUDA, **more)[0] for memory in ("store", "reverse")]
    assert found[0] == pytest.approx(found[1], abs=1e-2)
    assert found[0][-1] < found[0][0]


def test_step_in_backward_follows_ordinary_steps(tmp_path):
    ordinary = trained(tmp_path / "a", clip=0.0, precision="float32", **CUDA)[0]
    assert trained(tmp_path / "b", step_in_backward=True, precision="float32", **CUDA)[0] == pytest.approx(ordinary, abs=1e-3)


def test_resumes(tmp_path):
    whole = trained(tmp_path / "whole", **CUDA)[0]
    settings = tiny(tmp_path / "parts", save_every=4, **CUDA)
    train(settings)
    (settings.out / "checkpoints" / f"step-{settings.steps:08d}.pt").unlink()  # as if killed before it was written
    train(replace(settings, resume=True))
    assert losses(settings.out) == pytest.approx(whole, abs=1e-2)


def test_activations_are_flat_in_depth(tmp_path):
    def kept(depth):
        sizes = {**CUDA, "width": 256, "context": 512}  # the allocator may count a megabyte too much
        return kept_by(build(tiny(tmp_path, depth=depth, **sizes)), ("store", "reverse"), rows=8, autocast=True)

    shallow, deep = kept(4), kept(16)
    assert deep["reverse"] == pytest.approx(shallow["reverse"], rel=0.1)
    assert deep["store"] > 2 * shallow["store"]
