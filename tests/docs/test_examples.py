"""Every example trains, at a small size, and prints how much less it keeps than ordinary autograd would."""

import re
import runpy

import pytest
from support import ROOT

FOLDER = ROOT / "examples"
SMALL = {
    "graph_network": "--depth 3 --width 32 --nodes 200 --steps 15",
    "image_classifier": "--depth 2 --channels 8 --batch 32 --steps 40",
    "thousand_layers": "--layers 60 --batch 64 --steps 40",
    "two_modalities": "--depth 2 --width 32 --batch 64 --steps 100",
}


def test_all_examples_are_tested():
    """The demo is tested with the command that it runs; what needs other libraries, in tests/integrations."""
    others = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests" / "integrations").glob("test_*.py"))
    untested = {path.stem for path in FOLDER.glob("*.py")} - {*SMALL, "demo"}
    assert [name for name in untested if f'"{name}"' not in others and f'"{name}.py"' not in others] == []


@pytest.mark.parametrize("name", SMALL)
def test_trains_and_keeps_little(name, capsys):
    losses = runpy.run_path(str(FOLDER / f"{name}.py"))["main"](SMALL[name].split())
    assert sum(losses[-4:]) < 0.8 * sum(losses[:4]), losses
    said = capsys.readouterr().out
    units = {"KiB": 1, "MiB": 1024}
    kept = {policy: float(size) * units[unit] for policy, size, unit in re.findall(r"under (\w+) +([\d.]+) ([KM]iB)", said)}
    assert kept["reverse"] < 0.5 * kept["store"], said
    assert kept["reverse"] <= kept["checkpoint"], said
