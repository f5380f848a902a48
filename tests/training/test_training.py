"""The loop in this process: the same losses under every policy, resume to the bit, and what stops it."""

import json
import math
from dataclasses import replace

import pytest
import torch
from support import rg
from training_support import last, losses, same, tiny, trained

from retrograde.training import checkpoints
from retrograde.training.errors import TrainingError
from retrograde.training.loop import Trainer, train
from retrograde.training.memory import kept_by
from retrograde.training.metrics import read
from retrograde.training.settings import differences, settle
from retrograde.training.trained import load_model

FIFTY = {"steps": 50, "depth": 6, "width": 32, "lr": 3e-3, "look_every": 50, "save_every": 0}


def test_reverse_equals_store_over_fifty_steps(tmp_path):
    """To the bit under exact arithmetic, weights included; within 1e-4 in floats."""
    kinds = {
        "store": ("store", "exact"),
        "exact": ("reverse", "exact"),
        "float": ("reverse", "float"),
        "plain": ("store", "float"),
    }
    found = {
        name: trained(tmp_path / name, memory=memory, arithmetic=arithmetic, **FIFTY)
        for name, (memory, arithmetic) in kinds.items()
    }
    store, exact = found["store"], found["exact"]
    assert len(store[0]) == 50
    assert store[0][-1] < store[0][0] - 1
    assert store[0] == exact[0]
    assert same(store[1], exact[1])
    for other in ("store", "plain"):
        apart = max(abs(a - b) for a, b in zip(found["float"][0], found[other][0], strict=True))
        assert apart < 1e-4, other
    assert found["float"][0] != store[0]


def test_reverse_equals_store_with_dropout(tmp_path):
    """To the bit, weights included: backward drops what the forward pass dropped."""
    store, reverse = (
        trained(tmp_path / memory, memory=memory, arithmetic="exact", dropout=0.3, accumulate=2)
        for memory in ("store", "reverse")
    )
    assert store[0] == reverse[0]
    assert same(store[1], reverse[1])


def test_an_ordinary_net_with_bits(tmp_path):
    """Reversed, it trains as under store, to the bit. Its noise is in steps alone, and whoever loads it gets the plain net."""
    kinds = {"store": {"memory": "store", "bits": 4}, "reverse": {"bits": 4}, "plain": {}}
    more = {"streams": 1, "dropout": 0.3, "accumulate": 2, "sample": 30}
    found = {name: trained(tmp_path / name, **kind, **more) for name, kind in kinds.items()}
    assert settle(device="cpu", **kinds["reverse"], **more).memory == "reverse"
    assert found["store"][0] == found["reverse"][0]
    assert same(found["store"][1], found["reverse"][1])
    assert all(a != b for a, b in zip(found["reverse"][0], found["plain"][0], strict=True))
    first = [read(tmp_path / name / "run/metrics.jsonl")[0]["held_out_bits"] for name in kinds]
    assert first[0] == first[1] == first[2]
    model = load_model(tmp_path / "reverse" / "run", "cpu")
    assert model.extend(b"\0", 30, generator=torch.Generator().manual_seed(0)) == found["reverse"][2].sample


def test_dropout_in_steps_alone(tmp_path):
    """The weights stay, so that all evaluations and both samples are the same, and losses differ by dropout alone."""
    still = {"lr": 0.0, "steps": 3, "look_every": 1, "sample": 30}
    found = {dropout: trained(tmp_path / str(dropout), dropout=dropout, **still) for dropout in (0.0, 0.5)}
    assert all(a != b for a, b in zip(found[0.0][0], found[0.5][0], strict=True))
    held_out = [r["held_out_bits"] for d in found for r in read(tmp_path / str(d) / "run/metrics.jsonl") if "held_out_bits" in r]
    assert len(held_out) == 8
    assert len(set(held_out)) == 1
    assert found[0.0][2].sample == found[0.5][2].sample
    model = load_model(tmp_path / "0.5" / "run", "cpu")
    assert model.extend(b"\0", 30, generator=torch.Generator().manual_seed(0)) == found[0.5][2].sample


def test_every_part_of_a_batch_has_its_own_dropout(tmp_path, monkeypatch):
    """No step, piece or run of another seed draws what another draws."""
    found, forward = [], Trainer.forward

    def noted(self, model, tokens):
        if torch.is_grad_enabled():
            found.append(torch.initial_seed())
        return forward(self, model, tokens)

    monkeypatch.setattr(Trainer, "forward", noted)
    for seed in (0, 1):
        trained(tmp_path / str(seed), seed=seed, steps=3, accumulate=4, dropout=0.3)
    assert len(found) == len(set(found)) == 2 * 3 * 4


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"step_in_backward": True},
        {"precision": "bf16", "accumulate": 2},
        {"streams": 1},
        {"streams": 2},
        {"streams": 1, "bits": 4, "accumulate": 2},
        {"dropout": 0.3, "accumulate": 2},
    ],
    ids=["plain", "step in backward", "bf16, accumulated", "one stream", "two streams", "bits", "dropout"],
)
def test_resumes_to_the_bit(tmp_path, more):
    """Interrupted after a few steps, then resumed: as if it had never stopped."""
    whole = trained(tmp_path / "whole", **more)
    settings = tiny(tmp_path / "parts", save_every=3, **more)
    with pytest.raises(Interrupted):
        train(settings, stop_after(5))
    assert checkpoints.step_of(checkpoints.found(settings.out / "checkpoints")[-1]) == 3
    train(replace(settings, resume=True))
    assert losses(settings.out) == whole[0]
    assert same(last(settings.out).tensors, whole[1])
    assert [r["step"] for r in read(settings.out / "metrics.jsonl") if "loss" in r] == list(range(1, 9))


class Interrupted(Exception):
    pass


def stop_after(step):
    def on_event(what, record):
        if what == "step" and record["step"] == step:
            raise Interrupted

    return on_event


def test_step_in_backward_equals_ordinary_steps(tmp_path):
    ordinary = trained(tmp_path / "a", clip=0.0)
    inside = trained(tmp_path / "b", step_in_backward=True)
    assert ordinary[0] == inside[0]
    assert same(ordinary[1], inside[1])


def test_pieces_of_a_batch_equal_the_whole(tmp_path):
    whole, pieces = trained(tmp_path / "a"), trained(tmp_path / "b", accumulate=4)
    assert max(abs(a - b) for a, b in zip(whole[0], pieces[0], strict=True)) < 1e-5


def test_it_learns_and_says_so(tmp_path):
    heard = []
    settings = tiny(tmp_path, steps=40, look_every=20, save_every=10, sample=20)
    outcome = train(settings, lambda what, record: heard.append((what, record)))
    held_out = [record["held_out_bits"] for what, record in heard if what == "evaluated"]
    assert len(held_out) == 3
    assert held_out[0] == pytest.approx(8, abs=0.3)
    assert held_out[-1] < held_out[0] - 2
    assert [record["step"] for what, record in heard if what == "saved"] == [10, 20, 30, 40]
    assert [path.name for path in checkpoints.found(settings.out / "checkpoints")] == ["step-00000030.pt", "step-00000040.pt"]
    assert len(outcome.sample) == 20
    steps = [record for what, record in heard if what == "step"]
    assert steps[0].keys() == {"step", "loss", "lr", "norm", "tokens_per_second", "seconds", "peak_bytes"}
    assert all(record["tokens_per_second"] > 0 and record["peak_bytes"] > 1e7 for record in steps)
    written = [json.loads(line) for line in (settings.out / "metrics.jsonl").read_text().splitlines()]
    assert written == [record for what, record in heard if what in ("step", "evaluated")]
    model = load_model(settings.out, "cpu")
    assert model.extend(b"\0", 20, generator=torch.Generator().manual_seed(0)) == outcome.sample


def test_learning_rate():
    settings = settle(device="cpu", steps=100, lr=1.0, warmup=10)
    rates = [settings.lr_at(step) for step in range(1, 101)]
    assert rates[:10] == pytest.approx([0.1 * i for i in range(1, 11)])
    assert rates[9:] == sorted(rates[9:], reverse=True)
    assert rates[-1] == pytest.approx(0.1)
    assert settle(device="cpu", steps=100, lr=1.0, warmup=0).lr_at(1) < 1


@pytest.mark.parametrize("more", [{}, {"step_in_backward": True}, {"arithmetic": "exact"}], ids=["float", "in backward", "exact"])
def test_a_loss_that_is_no_number_stops_it(tmp_path, more):
    settings = tiny(tmp_path, steps=4, save_every=2, **more)
    train(settings)
    kept = last(settings.out)
    with pytest.raises(TrainingError, match=r"step (5|6|7|8).*the last good state is .*step-00000004.pt") as caught:
        train(tiny(tmp_path, steps=30, save_every=1000, warmup=0, lr=1e30, resume=True, **more))
    assert "\n" not in str(caught.value)
    assert same(last(settings.out).tensors, kept.tensors)


def test_spoilt_weights_are_not_saved(tmp_path, monkeypatch):
    """Without clipping nobody looks at gradients: the checkpoint does."""
    settings = tiny(tmp_path, steps=4, clip=0.0)
    train(settings)

    def spoil(what, record):
        if what == "step":
            with torch.no_grad():
                next(p for p in spoilt.parameters())[0, 0] = math.inf

    from retrograde.training import loop

    def build(settings):
        nonlocal spoilt
        spoilt = original(settings)
        return spoilt

    spoilt, original = None, loop.build
    monkeypatch.setattr(loop, "build", build)
    with pytest.raises(TrainingError, match=r"weights are not finite after step 5; the last good state is .*step-00000004.pt"):
        train(tiny(tmp_path, steps=5, clip=0.0, resume=True, windows=1, look_every=9), spoil)


def test_other_settings_on_resume(tmp_path):
    train(tiny(tmp_path, steps=2))
    notes = []
    on_event = lambda what, record: notes.append(record) if what == "note" else None  # noqa: E731
    train(tiny(tmp_path, steps=3, lr=1e-3, dropout=0.1, resume=True), on_event)
    assert "resumed from" in notes[0]["text"]
    assert "steps 3 (was 2)" in notes[0]["text"]
    assert "lr 0.001 (was 0.01)" in notes[0]["text"]
    assert "dropout 0.1 (was 0.0)" in notes[0]["text"]
    with pytest.raises(TrainingError, match="the checkpoint has width 16, this command width 32: give the sizes"):
        train(tiny(tmp_path, steps=3, width=32, resume=True))
    with pytest.raises(TrainingError, match="the run is at step 3 already, steps 2 are behind it"):
        train(tiny(tmp_path, steps=2, resume=True))
    with pytest.raises(TrainingError, match="holds a run already"):
        train(tiny(tmp_path, steps=3))
    (tmp_path / "text" / "99.py").write_text("more " * 99)
    with pytest.raises(TrainingError, match="files were added, removed or changed in size"):
        train(tiny(tmp_path, steps=4, resume=True))
    now = settle(device="cpu").plain()
    assert differences({**now, "device": "cuda"}, now) == []
    assert differences({name: value for name, value in now.items() if name != "dropout"}, now) == []  # an older checkpoint


def test_resume_without_a_checkpoint_begins(tmp_path):
    notes = []
    on_event = lambda what, record: notes.append(record["text"]) if what == "note" else None  # noqa: E731
    train(tiny(tmp_path, steps=2, resume=True), on_event)
    assert "no checkpoint in" in notes[0]
    assert len(losses(tmp_path / "run")) == 2


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"steps": 0}, "steps must be 1 or more"),
        ({"lr": math.nan}, "lr must be 0 or more, got nan"),
        ({"clip": -1.0}, "clip must be 0 or more"),
        ({"dropout": 1.0}, "dropout must be 0 or more and less than 1, got 1.0"),
        ({"dropout": math.nan}, "dropout must be 0 or more and less than 1, got nan"),
        ({"bits": 4}, "bits 4 does not go with streams 3: it is for streams 1, an ordinary net"),
        ({"streams": 1, "bits": 9}, "bits must be from 1 to 8, got 9"),
        ({"device": "tpu"}, "device 'tpu' is not one of: auto, cpu, cuda"),
        ({"parallel": "dp"}, "parallel 'dp' is not one of"),
        ({"step_in_backward": True, "clip": 1.0}, "clip 1.0 does not go with step_in_backward: clipping by the global norm"),
        ({"step_in_backward": True, "accumulate": 2}, "accumulate 2 does not go with step_in_backward: accumulation keeps"),
        ({"step_in_backward": True, "parallel": "ddp"}, "parallel ddp does not go with step_in_backward: ddp averages"),
    ],
)
def test_bad_settings(given, message):
    with pytest.raises(TrainingError, match=message):
        settle(**{"device": "cpu"} | given)


def test_bad_combinations(tmp_path):
    with pytest.raises(TrainingError, match="batch 4 does not divide into 3 pieces"):
        train(tiny(tmp_path, accumulate=3))
    with pytest.raises(TrainingError, match="parallel ddp is for several processes: torchrun"):
        train(tiny(tmp_path, parallel="ddp"))
    with pytest.raises(rg.ProgramError, match="cannot be reversed"):
        train(tiny(tmp_path, streams=1, memory="reverse"))
    if not torch.cuda.is_available():
        with pytest.raises(TrainingError, match="no CUDA device"):
            settle(device="cuda")


def test_one_process_without_parallel_under_torchrun(tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(TrainingError, match="torchrun started 2 processes: say how they share the work"):
        train(tiny(tmp_path))


def test_what_a_step_keeps(tmp_path):
    from retrograde.training.loop import build

    found = {depth: kept_by(build(tiny(tmp_path, depth=depth)), ("store", "checkpoint", "reverse"), rows=4) for depth in (3, 9)}
    assert found[9]["reverse"] == pytest.approx(found[3]["reverse"], rel=0.05)
    assert found[9]["store"] > 2 * found[3]["store"]
    assert found[9]["store"] > 2 * found[9]["checkpoint"] > 2.2 * found[9]["reverse"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of torch's compiler
def test_compiled(tmp_path):
    eager, compiled = trained(tmp_path / "a", steps=4), trained(tmp_path / "b", steps=4, compile=True)
    assert max(abs(a - b) for a, b in zip(eager[0], compiled[0], strict=True)) < 1e-4
    more = {"steps": 4, "compile": True, "dropout": 0.3, "arithmetic": "exact"}  # it draws other numbers than eager dropout does
    store, reverse = (trained(tmp_path / memory, memory=memory, **more) for memory in ("store", "reverse"))
    assert store[0] == reverse[0]
    assert same(store[1], reverse[1])
    assert abs(store[0][-1] - compiled[0][-1]) > 1e-4


def test_checkpoints_from_before_there_were_streams():
    """They name one_stream, or nothing, and no dropout."""
    now = settle(device="cpu", streams=2).plain()
    old = {name: value for name, value in now.items() if name not in ("streams", "bits", "dropout")}
    assert differences({**old, "one_stream": False}, now) == differences(old, now) == []
    with pytest.raises(TrainingError, match="the checkpoint has streams 1, this command streams 2"):
        differences({**old, "one_stream": True}, now)
