"""python -m retrograde.bench.layers, in a few seconds on the CPU, with the link of the tests (offload_support.py)."""

import gc
import json

import pytest
import torch
from support import loaded_by, rg

from retrograde._memory import link, offload
from retrograde.bench import layers, results, ways

TINY = ["--device", "cpu", "--dim", "16", "--heads", "2", "--seq", "8", "--batch", "2", "--depth", "3", "--rounds", "2"]
ALL = ["save-on-cpu", "rg-checkpoint", "rg-offload", "bits", "reverse"]  # but for those that inductor compiles


@pytest.fixture(scope="module", autouse=True)
def _quick_collections():
    """Each step begins with a garbage collection, which need not walk through all that pytest and torch have loaded."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
def lanes(monkeypatch):
    monkeypatch.setattr(offload, "_LANES", {})


def test_a_report(lanes, tmp_path, capsys):
    path = tmp_path / "2026-01-01-layers-cpu.json"
    assert layers.main([*TINY, "--depth", "3", "5", "--ways", *ALL, "--rule", "--json", str(path)]) == 0
    found = json.loads(path.read_text())
    assert [(row["depth"], row["way"]) for row in found["rows"]] == [
        (depth, name) for depth in (3, 5) for name in ("ordinary", "checkpoint", *ALL)
    ]
    for row in found["rows"]:
        assert row["seconds"]["low"] <= row["seconds"]["median"] <= row["seconds"]["high"]
        assert row["activation_bytes"] > 0
        assert row["gradient_error"] is None if row["way"] == "ordinary" else row["gradient_error"] < 1e-5
        assert row["to_checkpoint"] == pytest.approx(1) if row["way"] == "checkpoint" else row["to_checkpoint"] > 0
        assert (row["pinned_bytes"] is not None) == (row["way"] == "rg-offload")
    out = capsys.readouterr().out
    assert out.count("  over checkpoint: rg-offload ") == 2
    assert out.splitlines()[-1].split()[:3] == ["16", "8", "5"]
    page = results.page([path])
    assert "| dim | seq | batch | depth | way | ms (quartiles) | times checkpoint's | activations |" in page
    assert page.count("| rg-offload |") == 2


def test_pinned_memory_as_predicted(lanes):
    """Sizes of whole pages. The inputs of all layers but the last are there, and no more."""
    args = layers.make_parser().parse_args(
        ["--device", "cpu", "--dim", "64", "--seq", "64", "--batch", "1", "--depth", "6", "--rounds", "2", "--ways", "rg-offload"]
    )
    *_, row = layers.measure(args, [])["rows"]
    assert row.pinned_bytes == row.predicted_pinned_bytes == 5 * 64 * 64 * 4


def test_without_a_link(monkeypatch, capsys):
    monkeypatch.delitem(link.MAKE, "cpu")
    assert layers.main([*TINY, "--ways", "rg-*"]) == 0
    out = capsys.readouterr().out
    assert "left out, as there is no link to host memory from cpu: rg-offload, rg-offload-compiled\n" in out
    assert out.count("  rg-checkpoint ") == 1


def test_a_way_that_fails_leaves_the_others(monkeypatch, capsys):
    def fails(subject):
        raise torch.OutOfMemoryError("all gone")

    monkeypatch.setitem(ways.WAYS, "mine", ways.Way(lambda s: s.loop(lambda layer, x: layer(x) * 2), own=False))
    monkeypatch.setitem(ways.WAYS, "failing", ways.Way(fails))
    assert layers.main([*TINY, "--ways", "mine", "failing"]) == 0
    out = capsys.readouterr().out
    assert out.count("failing is left out: OutOfMemoryError: all gone") == 1
    (error,) = (float(line.split()[-1]) for line in out.splitlines() if line.split()[:1] == ["mine"])
    assert error > 0.1, "its gradients are others"


def test_every_way_runs_the_same_layers():
    size = ways.Size(dim=16, heads=2, seq=4, batch=2, depth=2, dtype="float32", autocast="none")
    subject = ways.Subject(size, "cpu")
    copies = subject.copies()
    assert [*map(id, copies[0].parameters())] == [*map(id, subject.layers[0].parameters())]
    assert copies[0].mlp is not subject.layers[0].mlp
    x = subject.x
    for layer in subject.layers:
        x = x + layer.attention(x)
        x = x + layer.mlp(x)
    for name in ("ordinary", "checkpoint", "rg-checkpoint"):
        assert torch.equal(ways.WAYS[name].make(subject)(subject.x), x)
    assert isinstance(ways.WAYS["reverse"].make(subject), rg.ReversibleSequence)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of the compiler's own
def test_the_compiled_ways(lanes, capsys):
    assert layers.main([*TINY, "--ways", "partition", "rg-offload-compiled"]) == 0
    assert capsys.readouterr().out.count("  rg-offload-compiled / partition: ") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--dim 10 --heads 4", "--dim 10 is not a multiple of --heads 4"),
        ("--dim 200", "--dim 200 is not a multiple of --heads 3"),
        ("--depth 0", "--depth must be 1 or more, got 0"),
        ("--rounds 1", "--rounds must be 2 or more, got 1"),
        ("--batch 0", "--batch must be 1 or more, got 0"),
        ("--tokens 100 --seq 64", "--tokens 100 is not a multiple of --seq 64"),
        ("--ways faster", "no way is called 'faster', there are: ordinary, "),
        ("--host lots", "--host 'lots' is not a size"),
        ("--json no/such/folder.json", "there is no directory no/such"),
    ],
)
def test_refusals(arguments, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        layers.main(["--device", "cpu", *arguments.split()])
    assert message in capsys.readouterr().err


def test_torch_is_all_that_it_loads():
    assert not loaded_by("import retrograde.bench.layers") & {"tyro", "rich", "matplotlib"}
