"""The training loops in examples, and the code of docs/transformers.md and docs/frameworks.md."""

import importlib
import re
from pathlib import Path

import pytest
from accelerate.state import AcceleratorState

pytestmark = [pytest.mark.integrations, pytest.mark.filterwarnings("ignore")]  # the frameworks warn
ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _fresh():
    """Accelerate keeps the settings of a process, which a Trainer may have made."""
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.parametrize("name", ["plain_loop", "accelerate_loop", "lightning_loop", "deepspeed_loop"])
def test_example_learns(name, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    options = {"enable_progress_bar": False, "enable_model_summary": False} if name == "lightning_loop" else {}
    if name == "deepspeed_loop":
        pytest.importorskip("deepspeed")  # not installed by `make test-integrations`: it is built from source
    losses = importlib.import_module(name).train(steps=25, **options)
    assert len(losses) == 25
    assert losses[0] > 5
    assert losses[-1] < 0.75 * losses[0]


@pytest.mark.parametrize("page", ["finetune.md", "frameworks.md", "transformers.md"])
def test_code_of_docs(page, tmp_path, monkeypatch):
    """Blocks marked `{ .python .integrations }`, which the ordinary suite passes by."""
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```(?:python|\{ \.python \.integrations \})\n(.*?)```", (ROOT / "docs" / page).read_text(), re.DOTALL)
    assert blocks
    names: dict = {}
    for block in blocks:
        exec(compile(block, page, "exec"), names)
