"""A real pretrained net with reversible noise: MiniLM, six layers of BERT, as it is."""

import runpy

import pytest
from support import ROOT

pytestmark = [pytest.mark.integrations, pytest.mark.filterwarnings("ignore")]
EXAMPLE = runpy.run_path(str((ROOT / "examples" / "embeddings").with_suffix(".py")))


def test_embeddings():
    """In eval to the bit (the example asserts it); in training to a cosine of 0.997 at the default bits."""
    cosine = EXAMPLE["cosines"](*EXAMPLE["minilm"](), bits=(3, 4, 5))
    assert cosine[4] > 0.997
    assert cosine[3] < cosine[4] < cosine[5] < 0.99999


def test_contrastive_fine_tuning():
    """It ends where ordinary fine-tuning ends, and transformers alone loads the result. (More steps in the example.)"""
    losses = EXAMPLE["compare"](steps=12, bits=4)
    assert losses["ordinary"] < 0.99 * losses["before"], losses
    assert losses["reverse"] == pytest.approx(losses["ordinary"], rel=0.01), losses
    assert losses["loaded"] == losses["reverse"], losses
