"""retrograde plan: what is predicted, against what real steps take."""

import json
import resource
import sys
import time
from contextlib import nullcontext

import pytest
import torch
from support import ROOT, retrograde_command
from torch import nn
from torch._subclasses import FakeTensorMode

import retrograde as rg
from retrograde._exact.fake import as_on
from retrograde.bench import foretold
from retrograde.bench.meter import LiveBytes
from retrograde.cli import app
from retrograde.cli.plan import Options, setting_of
from retrograde.planning.plan import REACHES, make_plan
from retrograde.planning.predict import HIGH, WAYS, Planner, Predicted
from retrograde.planning.reach import deepest, longest, widest
from retrograde.planning.subject import traced
from retrograde.planning.trace import Tracer
from retrograde.planning.verdict import verdict

GIB = 2**30
TRACED: dict = {}
SMALL = {"device": "cpu", "dim": 32, "heads": 2, "seq": 64, "batch": 2, "depth": 9}
MODELS = """
import torch
import retrograde as rg
from retrograde.models.blocks import Residual
from retrograde.models.language import Language

def language(depth, dim, seq, batch):
    tokens = torch.randint(256, (batch, seq + 1))
    return Language(depth, dim, 2, seq), (tokens[:, :-1], tokens[:, 1:])

def of_fixed_depth():
    fns = [torch.nn.Linear(32, 32) for _ in range(6)]
    return rg.Reversible(rg.wirings.leapfrog(fns)), ({"a": torch.randn(5, 32), "b": torch.randn(5, 32)},)

def half(depth, dim):
    return rg.ReversibleSequence([(torch.nn.Linear(dim, dim), torch.nn.Linear(dim, dim)) for _ in range(depth)]).half()

def encoder(depth, dim):
    layer = torch.nn.TransformerEncoderLayer(dim, 2, 4 * dim, norm_first=True, batch_first=True)  # copied for each of the layers
    return rg.from_transformer(torch.nn.TransformerEncoder(layer, depth, enable_nested_tensor=False))

def normed(dim):
    def fn():
        return torch.nn.Sequential(torch.nn.BatchNorm2d(dim), torch.nn.Conv2d(dim, dim, 3, padding=1))
    return fn(), fn()

class Quadratic(torch.nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.dim = dim
    def forward(self, x):
        return (x @ x.mT).softmax(-1) @ x / self.dim

def quadratic(dim):
    return Quadratic(dim), torch.nn.Linear(dim, dim)

def ordinary(depth):
    return torch.nn.Linear(3, 3)

def fails(depth, batch):
    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.net = half(depth, 8)
        def forward(self, x):
            raise ValueError(300 * "x")
    return Net(), torch.randn(batch, 8)

def noisy(depth, dim):
    return rg.Sequential([Residual(torch.nn.Tanh(), torch.nn.Linear(dim, dim)) for _ in range(depth)], bits=4)

def one_way(depth, dim):
    net = noisy(depth, dim)
    net.bits = None
    return net

def number():
    return 3

def looks(depth, dim):
    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.net = half(depth, dim).float()
        def forward(self, x):
            return self.net(x) if x.sum() > 0 else x
    return Net()
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    (tmp_path / "plan_models.py").write_text(MODELS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    sys.modules.pop("plan_models", None)


def planner(**options):
    """For these options, with the steps that other tests have traced already."""
    found = Planner(setting_of(Options(**{**SMALL, **options})))
    alike = ("device", "dim", "heads", "shape", "dtype", "autocast", "block", "model", "compile_budget")
    found.known = TRACED.setdefault(str([found.setting[name] for name in alike]), {})
    return found


@pytest.mark.parametrize("grads", ["kept", "none"])
def test_predictions_are_what_the_meter_measures(grads):
    precision = {"kept": "bfloat16", "none": "none"}[grads]  # exact and float arithmetic
    setting = {"device": "cpu", "widths": [32], "depths": [8], "length": 32, "batch": 2, "autocast": [precision]}
    rows = foretold.compare({**setting, "grads": grads}, say=lambda text: None)
    assert len(rows) == 5
    for row in rows:
        sketched = row.policy == "checkpoint" and precision == "bfloat16"  # on a CPU in float32, which a trace leaves out
        limit = 0.05 if row.policy == "budget" or sketched else 0.005
        assert abs(row.error) < limit, row
        assert row.activations > 2 * 32 * 32 * 4


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_blocks_with_running_statistics(here, device):
    """BatchNorm in training, told from blocks of four and six: what the meter measures, and every way has a prediction."""
    plan = planner(block="plan_models:normed", device=device, shape=(4, 32, 8, 8), depth=8, budget="512KiB")
    told = {way: plan.at(way, (8, 1, 4)).activations for way in WAYS}
    assert told["reverse"] < min(told["checkpoint"], told["compile"]) <= told["store"]
    if device == "cuda":
        return
    for way in ("store", "checkpoint", "reverse", "budget"):
        net = rg.ReversibleSequence([sys.modules["plan_models"].normed(32) for _ in range(8)])
        net.memory = rg.Budget(512 * 1024) if way == "budget" else way
        for p in net.parameters():
            p.grad = torch.zeros_like(p)
        x = torch.randn(4, 32, 8, 8, requires_grad=True)
        with LiveBytes() as meter:
            net(x).square().mean().backward()
        assert told[way] == pytest.approx(meter.peak + x.nbytes, rel=0.1), way


def recorded(name):
    report = json.loads((ROOT / "benchmarks" / f"2026-11-16-{name}-h200.json").read_text())
    return report["setting"], {(row["depth"], row["policy"]): row for row in report["rows"]}


@pytest.mark.parametrize("name", ["depth", "depth-96-grads-none-more-tokens"])
def test_predictions_are_what_a_gpu_measured(name):
    """Within six percent of the peaks that are kept in benchmarks, there with torch's own checkpoint; a plan counts the input."""
    there, rows = recorded(name)
    sizes = {"dim": there["width"], "heads": there["heads"], "seq": there["length"], "batch": there["batch"]}
    plan = planner(device="cuda", **sizes, optimizer="sgd", grads=there["grads"])
    given = 4 * there["batch"] * there["length"] * there["width"]
    for (depth, policy), row in rows.items():
        told = plan.at(policy, (depth, there["length"], there["batch"]))
        over = told.step - told.parameters - (told.gradients if there["grads"] == "kept" else 0) - given
        assert over == pytest.approx(row["activation_bytes"], rel=0.06), (depth, policy)


@pytest.mark.parametrize("way", WAYS)
def test_depth_is_a_line(way):
    """A net of nine blocks is traced itself, and told from four and six."""
    plan = planner(grads="none", budget="300KiB")
    sizes = (9, 64, 2)
    told = plan.at(way, sizes)
    plan.all_along = lambda way, sizes, measure: measure(plan.trace(way, *sizes))
    policy = rg.Budget(300 * 1024) if way == "budget" else way
    found = plan.trace(policy, *sizes)
    assert HIGH < 9
    assert told.activations == pytest.approx(max(found.windows(0.0)), rel=0.01)
    assert told.step - told.parameters - told.states == pytest.approx(max(found.windows(1.0)), rel=0.03)


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_a_budget_in_a_deep_net(share):
    """Half of 24 blocks fit: told from a net of eight."""
    plan = planner()
    limit = round(plan.activations("store", (24, 64, 2), 0.0) / 2)
    told, stored = plan.within(limit, (24, 64, 2), share)
    assert all(depth <= 8 for _, depth, _, _ in plan.known if depth != 9)
    found = traced(plan.tracer, plan.setting, rg.Budget(limit), 24, 64, 2)
    assert told == pytest.approx(max(found.windows(share)), rel=0.02)
    assert 6 < stored < 18


def test_the_optimizer_and_its_step():
    net = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(5))
    own = sum(p.nbytes for p in net.parameters())
    for p in net.parameters():
        p.grad = torch.ones_like(p)
    optimizer = torch.optim.AdamW(net.parameters(), foreach=True)
    optimizer.step()
    states = sum(t.nbytes for state in optimizer.state.values() for t in state.values() if t.dim())
    with LiveBytes() as meter:
        optimizer.step()
    told = planner(device="cuda").at("reverse", (9, 64, 2))
    assert states == 2 * own
    assert told.states == 2 * told.gradients
    assert meter.peak == pytest.approx(own, rel=0.01)
    assert told.optimizer == told.parameters + told.states + 2 * told.gradients
    fused = planner(device="cuda", optimizer="adamw-fused").at("reverse", (9, 64, 2))
    assert fused.optimizer == told.optimizer - told.gradients


def test_gradients_none_kept_and_stepped():
    found = {
        grads: planner(grads=grads, depth=40, seq=8, optimizer="sgd").at("reverse", (40, 8, 2))
        for grads in ("none", "kept", "stepped")
    }
    kept, none, stepped = found["kept"], found["none"], found["stepped"]
    assert kept.activations == none.activations == stepped.activations
    assert kept.step == kept.parameters + kept.gradients + kept.activations
    assert stepped.peak == stepped.parameters + stepped.activations
    assert stepped.peak < none.peak < kept.peak


def test_sharding():
    """Eight devices hold an eighth each, and two blocks' parameters and gradients for a moment."""
    one, eight = (planner(devices=devices, depth=24).at("store", (24, 64, 2)) for devices in (1, 8))
    block = one.parameters // 24
    assert (eight.parameters, eight.gradients, eight.states) == (one.parameters // 8, one.gradients // 8, one.states // 8)
    assert one.gathered == 0
    assert eight.gathered == 4 * block
    assert eight.activations == one.activations


@pytest.mark.parametrize(
    ("reach", "which", "way"),
    [(deepest, 0, "budget"), (longest, 1, "store"), (widest, 2, "budget")],
)
def test_reaches_are_the_last_that_fit(reach, which, way):
    plan = planner(gpu_memory="6MiB")
    room = plan.setting["room"]
    sizes = [5, 64, 2]
    sizes[which] = reach(plan, way, tuple(sizes))
    assert sizes[which] > 2
    assert plan.at(way, tuple(sizes)).peak <= room
    sizes[which] = round(1.05 * sizes[which]) + 1
    assert plan.at("reverse" if way == "budget" else way, tuple(sizes)).peak > 0.85 * room
    if way != "budget":
        assert plan.at(way, tuple(sizes)).peak > room


@pytest.mark.parametrize("way", ["store", "reverse"])
def test_the_longest_sequence_where_memory_grows_as_its_square(here, way):
    plan = planner(block="plan_models:quadratic", gpu_memory="40MiB")
    found = longest(plan, way, (9, 64, 2))
    assert plan.at(way, (9, found, 2)).peak <= 1.01 * plan.setting["room"] < plan.at(way, (9, round(1.04 * found), 2)).peak


@pytest.mark.parametrize("way", ["store", "budget"])
def test_few_steps_are_traced(way):
    """They are what a plan takes time for: two depths at the size that is given and at one or two others, and for a budget."""
    plan = Planner(setting_of(Options(**SMALL | {"depth": 24, "gpu_memory": "24MiB"})))
    assert longest(plan, way, (24, 64, 2)) > 64
    assert len(plan.known) <= {"store": 4, "budget": 8}[way]


@pytest.mark.parametrize(("reach", "which"), [(longest, 1), (widest, 2)])
def test_a_given_budget_reaches_no_further_than_it_can(reach, which):
    """There is room for more, and real steps are refused from there on."""
    plan = planner(gpu_memory="1GiB", budget="400KiB")
    sizes = [5, 64, 2]
    sizes[which] = reach(plan, "budget", tuple(sizes))
    assert plan.setting["budget"] * 0.8 < plan.least_budget(tuple(sizes)) <= plan.setting["budget"]
    for more, refused in ((0, False), (2, True)):
        sizes[which] += more
        net = foretold.transformer(5, 32, 2)
        net.memory = rg.Budget(plan.setting["budget"])
        x = torch.randn(sizes[2], sizes[1], 32, requires_grad=True)
        with pytest.raises(rg.ProgramError, match="too small") if refused else nullcontext():
            net(x).sum().backward()


def test_a_given_budget_and_less_memory():
    """A budget as large as the memory does not fit beside the parameters, once there is enough to store."""
    plan = planner(gpu_memory="4MiB", budget="4MiB")
    depth = deepest(plan, "budget", (5, 64, 2))
    assert 1 < depth < deepest(plan, "reverse", (5, 64, 2))
    assert plan.at("budget", (depth, 64, 2)).peak <= plan.setting["room"]


def test_nothing_reaches():
    plan = planner(gpu_memory="1KiB")
    assert [reach(plan, "reverse", (2, 64, 2)) for reach in (deepest, longest, widest)] == [0, 0, 0]


def rows_of(**changed):
    """Peaks of 100, 60 and 20 bytes; 8 of them are parameters and what belongs to them."""
    held = {"parameters": 2, "gradients": 2, "states": 4, "gathered": 0, "optimizer": 10}
    of_way = {"store": 92, "checkpoint": 52, "reverse": 12}
    return {
        way: Predicted(way, **{**held, "activations": over, "step": over + 8, **changed.get(way, {}), **changed.get("all", {})})
        for way, over in of_way.items()
    }


@pytest.mark.parametrize(
    ("room", "changed", "worth", "words"),
    [
        (100, {}, False, "No: ordinary training fits"),
        (99, {}, False, "No: checkpointing fits"),
        (59, {}, True, "Yes: reversal fits"),
        (19, {}, False, "No: nothing fits at these sizes"),
        (7, {}, False, "No: nothing fits. Parameters, gradients and optimizer alone"),
        (None, {}, True, "Yes, if memory is short"),
        (None, {"checkpoint": {"activations": 12, "step": 20}}, False, "too shallow"),
        (None, {"all": {"optimizer": 200}}, False, "the step of the optimizer is what takes most"),
        (None, {"checkpoint": {"step": 22}}, False, "gradients grow while activations shrink"),
        (
            None,
            {way: {"parameters": 900, "step": step} for way, step in (("checkpoint", 960), ("reverse", 920))},
            False,
            "little",
        ),
    ],
)
def test_verdicts(room, changed, worth, words):
    """It says no when it is no."""
    told = verdict({"room": room, "grads": "none"}, rows_of(**changed))
    assert (told[0], words in told[1]) == (worth, True), told


def test_gradients_hide_the_saving_of_a_real_net():
    plan = planner(depth=60, optimizer="sgd")
    worth, words = verdict(plan.setting, {way: plan.at(way, (60, 64, 2)) for way in ("store", "checkpoint", "reverse")})
    assert not worth
    assert "gradients grow while activations shrink" in words
    kept = planner(depth=60, optimizer="sgd", grads="kept")
    assert verdict(kept.setting, {way: kept.at(way, (60, 64, 2)) for way in ("store", "checkpoint", "reverse")})[0]


def test_the_large_case_is_quick_and_small():
    """100 layers of width 8192 and 32768 tokens; with the search for what fits in `make test-slow`."""
    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    plan = planner(device="cuda", dim=8192, heads=128, depth=100, seq=32768, batch=1)
    told = plan.at("reverse", (100, 32768, 1))
    assert time.process_time() - start < 30
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1 << 20  # KiB
    assert told.parameters == 100 * 4 * (12 * 8192**2 + 13 * 8192)
    assert 10 * GIB < told.activations < 20 * GIB


@pytest.mark.slow
def test_the_large_case_by_the_command(tmp_path):
    start = resource.getrusage(resource.RUSAGE_CHILDREN)
    sizes = "--dim 8192 --depth 100 --seq 32768 --batch 1 --devices 64 --gpu-memory 80GiB"
    done = retrograde_command("plan", *sizes.split(), "--json", str(tmp_path / "plan.json"))
    assert done.returncode == 0, done.stderr
    end = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert end.ru_utime - start.ru_utime < 20
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss < 4 << 20  # KiB


def test_the_command(here, capsys, monkeypatch):
    without = tuple(way for way in WAYS if way != "compile")
    monkeypatch.setattr("retrograde.planning.predict.WAYS", without)  # splits of a function take a second at each size
    monkeypatch.delitem(REACHES, "seq")
    sizes = "--device cpu --dim 32 --heads 2 --seq 16 --batch 2 --depth 2 --gpu-memory 2MiB"
    assert app.main(["plan", *sizes.split(), "--json", "plan.json"]) == 0
    said = capsys.readouterr()
    assert said.err == ""
    assert "\x1b" not in said.out
    for words in ("fits", "deepest", "largest batch", "checkpoint", "blocks stored", "worth it? "):
        assert words in said.out
    told = json.loads((here / "plan.json").read_text())
    assert [row["way"] for row in told["rows"]] == list(without)
    assert all(row["reach"].keys() == {"depth", "batch"} for row in told["rows"])
    peak = {row["way"]: row["bytes"]["peak"] for row in told["rows"]}
    assert peak["store"] > peak["reverse"]


def test_a_picture_and_no_memory_to_fit_into(here, capsys):
    sizes = "--device cpu --dim 32 --heads 2 --seq 8 --batch 1 --depth 2"
    assert app.main(["plan", *sizes.split(), "--plot", "plan.png"]) == 0
    said = capsys.readouterr().out
    assert "torch.compile, budget 0.5" in said
    assert "deepest" not in said
    assert (here / "plan.png").read_bytes().startswith(b"\x89PNG")


def test_models_of_users(here):
    plan = planner(model="plan_models:language", device="cuda", heads=None)
    stored, reversed_ = (plan.at(way, (20, 64, 2)) for way in ("store", "reverse"))
    assert stored.activations > 4 * reversed_.activations
    assert stored.parameters == 4 * (256 * 32 + 32 + 20 * (4 * 32 * 32 + 2 * 32 + 3 * 32 * 96)) + 4 * 64 * 16
    fixed = make_plan(planner(model="plan_models:of_fixed_depth"))
    assert fixed.rows[0].predicted.parameters == 6 * 4 * (32 * 32 + 32)
    assert ", depth" not in fixed.what()
    halved = planner(model="plan_models:half", dtype="float16").at("store", (9, 64, 2))
    assert halved.parameters == 9 * 2 * 2 * (32 * 32 + 32)


def test_a_model_of_ordinary_layers(here):
    """With bits every way has a prediction, and each layer more is a checkpoint or the bits of one. Without, none is made."""
    found = make_plan(planner(model="plan_models:noisy", depth=24)).rows
    deeper = make_plan(planner(model="plan_models:noisy", depth=32)).rows
    assert [row.way for row in found] == ["store", "checkpoint", "compile", "reverse", "budget"]
    assert all(row.failed is None for row in found)
    grows = {a.way: (b.predicted.activations - a.predicted.activations) / 8 for a, b in zip(found, deeper, strict=True)}
    elements = 2 * 64 * 32
    assert grows["reverse"] == elements * 4 / 8
    assert grows["checkpoint"] == pytest.approx(4 * elements, rel=0.1)
    assert grows["checkpoint"] <= grows["compile"] <= grows["store"]
    with pytest.raises(rg.ProgramError, match=r"cannot be undone. Use rg.Sequential\(…, bits=4\)"):
        make_plan(planner(model="plan_models:one_way"))


def test_models_made_of_copies(here):
    """Of a net that is deep-copied, parameters are of their own and still fake ones of the same mode."""
    plan = planner(model="plan_models:encoder")
    told = {way: plan.at(way, (9, 64, 2)) for way in ("store", "reverse")}
    assert told["store"].parameters == 9 * 4 * (12 * 32 * 32 + 13 * 32)
    assert told["store"].activations > 3 * told["reverse"].activations


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--depth 0", "--depth must be 1 or more, got 0"),
        ("--dim 65 --heads 2", "--dim 65 is not a multiple of --heads 2"),
        ("--gpu-memory much", "--gpu-memory 'much' is not a size"),
        ("--gpu-memory 24", "--gpu-memory 24 is 24 bytes, did you mean 24GiB?\n"),
        ("--budget 8000", "--budget 8000 is 8000 bytes, did you mean 8000MiB?\n"),
        ("--reserve 2", "--reserve 2 is 2 bytes, did you mean 2GiB?\n"),
        ("--gpu-memory 1GiB", "--reserve 1.00 GiB leaves nothing of --gpu-memory 1.00 GiB"),
        ("--compile-budget 2", "--compile-budget must be between 0 and 1, got 2"),
        ("--grads some", "--grads 'some' is not one of: none, kept, stepped"),
        ("--devices 0", "--devices must be 1 or more"),
        ("--json nowhere/plan.json", "--json nowhere/plan.json: there is no directory nowhere"),
        ("--block math:sqrt --model math:sqrt", "--block and --model are two things"),
        ("--shape 2 3 4", "--shape: our block takes (batch, seq, dim)"),
        ("--model plan_models:none", "--model plan_models:none: plan_models has no 'none'"),
        ("--model plan_models:number", "--model plan_models:number must return a module"),
        ("--model plan_models:ordinary", "--model plan_models:ordinary: there is no rg.ReversibleSequence or rg.Reversible"),
        (
            "--model plan_models:looks",
            "--model plan_models:looks, depth 24, input 4 × 4096, traced at depth 4, on fake tensors: DataDependentOutput",
        ),
        (
            "--model plan_models:fails --depth 3 --batch 7",
            f"--model plan_models:fails, depth 3, batch 7, on fake tensors: ValueError: {300 * 'x'}\n",
        ),
        (
            "--block plan_models:normed --dim 8 --shape 5 9 4 4 --depth 48",
            "--block plan_models:normed, depth 48, input 5 × 9 × 4 × 4, traced at depth 4, on fake tensors: ",
        ),
        ("--model plan_models:of_fixed_depth --plot plan.png", "--plot draws the peak against depth, and --model"),
    ],
)
def test_refusals(arguments, message, here, capsys):
    assert app.main(["plan", *arguments.split()]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith(f"retrograde: {message}")
    assert said.err.count("\n") == 1


def test_the_way_out_is_told_where_it_is_one(here, capsys):
    """A model that came without inputs."""
    assert app.main(["plan", "--model", "plan_models:looks", "--dim", "32"]) == 2
    assert "; the input was 4 × 4096 × 32, for another one return (model, inputs)\n" in capsys.readouterr().err


def test_a_budget_that_is_too_small_is_a_row(capsys, monkeypatch):
    monkeypatch.setattr("retrograde.planning.predict.WAYS", ("store", "checkpoint", "reverse", "budget"))
    monkeypatch.delitem(REACHES, "seq")
    monkeypatch.delitem(REACHES, "batch")
    sizes = "--device cpu --dim 32 --heads 2 --seq 8 --batch 2 --depth 1 --budget 1KiB --gpu-memory 64MiB"
    assert app.main(["plan", *sizes.split()]) == 0
    said = capsys.readouterr().out
    assert "rg.Budget(1024) is too small" in said
    (row,) = (line for line in said.splitlines() if line.strip().startswith("Budget"))
    assert row.split() == ["Budget", "of", "1.0", "KiB", "too", "small", "no", "none"]


def test_a_budget_that_nobody_gave_is_not_too_small():
    plan = planner(depth=1)
    assert plan.at("budget", (1, 64, 2)).budget == plan.least_budget((1, 64, 2))


def test_the_least_budget_is_the_least():
    plan = planner()
    least = plan.least_budget((9, 64, 2))
    x = torch.randn(2, 64, 32, requires_grad=True)
    net = foretold.transformer(9, 32, 2)
    net.memory = rg.Budget(least)
    net(x).sum().backward()
    net.memory = rg.Budget(least - 1)
    with pytest.raises(rg.ProgramError, match=f"takes {least} bytes"):
        net(x)


class Dropped(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.drop = nn.RMSNorm(32), nn.Dropout(0.5)
        self.attend = nn.MultiheadAttention(32, 2, dropout=0.1, batch_first=True)

    def forward(self, x):
        x = self.norm(x)
        q = x.view(2, 64, 2, 16).transpose(1, 2)
        mixed = nn.functional.scaled_dot_product_attention(q, q, q, dropout_p=0.1)
        return self.drop(self.attend(x, x, x, need_weights=False)[0]) + mixed.transpose(1, 2).flatten(2)


def test_functions_keep_what_they_keep_on_cuda():
    """No weights of attention, no floats as masks; the second run does the same."""

    def make():
        net = rg.ReversibleSequence([(Dropped(), nn.LayerNorm(32)) for _ in range(4)])
        return net, (torch.randn(2, 64, 32, requires_grad=True),)

    def drop():
        drops = rg.ReversibleSequence([(nn.Dropout(0.5), nn.Dropout(0.5)) for _ in range(4)])
        return drops, (torch.randn(2, 64, 32, requires_grad=True),)

    masks = {device: Tracer(device).trace(drop, "store").kept for device in ("cpu", "cuda")}
    assert masks["cpu"] - masks["cuda"] == 8 * (2 * 64 * 32) * 3  # a byte of a number, not four
    kept = {device: Tracer(device).trace(make, "store").kept for device in ("cpu", "cuda")}
    weights = 4 * 2 * (2 * 2 * 64 * 64)  # of a block, in both attentions
    assert kept["cpu"] - kept["cuda"] > 4 * weights
    Tracer("cuda", torch.bfloat16).trace(make, "reverse")


def test_pretending_touches_no_real_tensor():
    """Exact arithmetic inside of a plan of another thread or of the same, on tensors that have values."""
    f = nn.Linear(8, 8)
    x = torch.randn(3, 8)
    updates = [rg.Update("a", f, "b")]
    right = rg.run(updates, {"a": x, "b": x}, arithmetic="exact")["a"]
    with as_on("cuda"):
        assert torch.equal(rg.run(updates, {"a": x, "b": x}, arithmetic="exact")["a"], right)
        with pytest.raises(rg.OutOfRange):
            rg.run(updates, {"a": x + 1e6, "b": x}, arithmetic="exact")
        with FakeTensorMode(), LiveBytes() as split:
            t = torch.randn(1000, 8)
            kept = rg.run([rg.Update("a", nn.Identity(), "b")], {"a": t, "b": t}, arithmetic="exact")
    assert kept["a"].dtype == torch.float32
    assert split.peak < 1000 * 8 * 40


def test_conversions_of_modules_are_put_back():
    before = nn.Module._apply
    planner().at("store", (1, 8, 1))
    assert nn.Module._apply is before
