"""The examples of fine-tuning, at a small size."""

import re
import runpy

import pytest
from support import ROOT

pytestmark = [pytest.mark.integrations, pytest.mark.filterwarnings("ignore")]
SMALL = "--depth 6 --width 32 --length 32 --pretrain 20 --steps 15"


@pytest.mark.parametrize("options", ["", "--full"])
def test_finetune(options, capsys):
    """Losses are those of ordinary fine-tuning, less is kept, and transformers loads what was saved."""
    example = runpy.run_path(str((ROOT / "examples" / "finetune").with_suffix(".py")))
    losses = example["main"]([*SMALL.split(), *options.split()])
    said = capsys.readouterr().out
    start = float(re.search(r"pretrained: ([\d.]+)", said)[1])
    learns = 0.99 if options else 1  # LoRA learns little in a few steps
    peak = {way: float(size) for size, way in re.findall(r"([\d.]+) MiB under (\w+)", said)}
    assert losses["ordinary"][0] < learns * start
    assert losses["checkpoint"] == pytest.approx(losses["ordinary"], rel=1e-4)
    assert losses["reverse"] == pytest.approx(losses["ordinary"], rel=1e-2)
    assert max(peak["reverse"], peak["checkpoint"]) < 0.7 * peak["ordinary"]
    assert "the same logits: True" in said
