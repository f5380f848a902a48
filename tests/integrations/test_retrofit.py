"""A pretrained net becomes reversible: β from 0, where it is the original, to 1."""

import copy
import logging
import sys
from pathlib import Path

import pytest
import torch
import transformers as hf

import retrograde as rg
from retrograde.integrations.transformers import Retrofit, reversible_

from . import zoo
from .test_transformers import assert_same, gradients_of

pytestmark = pytest.mark.integrations
EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize(
    "make", [zoo.llama, zoo.mistral, zoo.qwen2, zoo.qwen3, zoo.gpt2, zoo.vit], ids=lambda make: make.__name__
)
def test_begins_as_the_original(make):
    """In fp32: outputs to 1e-5, gradients too, and nothing is reversed."""
    plain = zoo.made(make, dtype=torch.float32).eval()
    model = reversible_(copy.deepcopy(plain), beta=0.0)
    batch = zoo.batch_for(plain)
    assert model.reversible.used_memory == "checkpoint"
    true, found = gradients_of(plain, batch), gradients_of(model, batch)
    assert (found["logits"] - true["logits"]).abs().max() <= 1e-5
    assert_same(found, true, 1e-4)


@pytest.mark.parametrize("beta", [0.3, 0.8])
def test_gradients_on_the_way(beta):
    """The equations by hand, and what the policies make of them."""
    plain = zoo.made(zoo.gpt2).eval()
    model = reversible_(copy.deepcopy(plain), beta=beta)
    batch = zoo.batch_for(plain)
    del batch["attention_mask"]
    x1 = x2 = plain.transformer.wte(batch["input_ids"]) + plain.transformer.wpe.weight[: zoo.LENGTH]
    for layer in plain.transformer.h:
        x1 = beta * x1 + (1 - beta) * x2 + layer.attn(layer.ln_1(x2))[0]
        x2 = beta * x2 + (1 - beta) * x1 + layer.mlp(layer.ln_2(x1))
    logits = plain.lm_head(plain.transformer.ln_f(beta / 2 * x1 + (1 - beta / 2) * x2))
    true = gradients_of(model, batch)  # under checkpoint
    torch.testing.assert_close(true["logits"], logits, rtol=1e-9, atol=1e-12)
    plain.loss_function(logits, batch["labels"], vocab_size=zoo.VOCABULARY).backward()
    for name, p in plain.named_parameters():
        torch.testing.assert_close(true[name], p.grad, rtol=1e-8, atol=1e-12)
    model.reversible.reversing = True
    for model.reversible.memory in ("store", "reverse"):
        assert_same(gradients_of(model, batch), true)


def test_the_error_that_is_measured_is_that_of_the_gradients():
    """Small β amplifies rounding: in fp32 the measured error falls with β, and is of the size of the true one."""
    measured = {}
    for beta in (0.0, 0.3, 0.6, 1.0):
        model = reversible_(zoo.made(zoo.llama, 4, torch.float32), beta=beta).train()
        batch = zoo.batch_for(model)
        model.reversible.due = True
        true = gradients_of(model, batch)
        measured[beta] = model.reversible.error
        if beta in (0.3, 0.6):
            model.reversible.reversing = True
            found = gradients_of(model, batch)
            names = [name for name in true if ".layers." in name]
            error = torch.cat([(found[name] - true[name]).flatten() for name in names]).norm()
            error = float(error / torch.cat([true[name].flatten() for name in names]).norm())
            assert measured[beta] / 30 < error < measured[beta] * 30
    assert measured[0.0] == float("inf")
    assert 1 > measured[0.3] > 10 * measured[0.6] > 10 * measured[1.0]
    assert measured[1.0] < 1e-5


def test_measuring_changes_nothing():
    """Neither random numbers nor gradients."""
    model = reversible_(zoo.made(zoo.llama, dtype=torch.float32), beta=0.5).train()
    batch = zoo.batch_for(model)
    true = gradients_of(model, batch)
    model.reversible.due = True
    found = gradients_of(model, batch)
    assert model.reversible.error is not None
    assert all(torch.equal(found[name], value) for name, value in true.items())


def test_rises_and_switches_on(caplog):
    model = reversible_(zoo.made(zoo.llama, 8, torch.float32), beta=0.0).train()
    retrofit, batch = Retrofit(model, 10, check_every=1), zoo.batch_for(model)
    betas = []
    with caplog.at_level(logging.INFO, "retrograde"):
        for _ in range(13):
            betas.append(model.reversible.beta)
            model(**batch).loss.backward()
            retrofit.step()
    assert betas == pytest.approx([*(i / 10 for i in range(10)), 1, 1, 1])
    memories = [made.memory for made in retrofit.history]
    assert memories == sorted(memories)  # "checkpoint" before "reverse"
    assert memories[0] == "checkpoint"
    assert memories[-1] == "reverse" == model.reversible.used_memory
    assert all((made.memory == "reverse") == (made.error < 1e-2) for made in retrofit.history)
    assert len(retrofit.history) == 10  # no more at the end
    assert model.config.retrograde == {"beta": 1.0}
    assert "retrofit: step 1, beta 0.100, gradient error" in caplog.text
    model(**batch).loss.backward()
    with pytest.raises(rg.ProgramError, match="reversible_"):
        Retrofit(zoo.made(zoo.llama), 10)
    with pytest.raises(rg.ProgramError, match="at least one step"):
        Retrofit(model, 0)
    with pytest.raises(rg.ProgramError, match="the last beta"):
        Retrofit(model, 10, end=0)


def test_goes_on_after_a_break(tmp_path):
    """β is in config.json."""
    model = reversible_(zoo.made(zoo.llama), beta=0.0)
    retrofit = Retrofit(model, 10)
    for _ in range(4):
        retrofit.step()
    model.save_pretrained(tmp_path)
    loaded = reversible_(hf.LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float64))
    assert loaded.reversible.beta == model.reversible.beta == 0.4
    batch = zoo.batch_for(model)
    torch.testing.assert_close(loaded.eval()(**batch).logits, model.eval()(**batch).logits)
    assert Retrofit(loaded, 10, start=4).beta == 0.4


def test_a_lower_beta_is_under_checkpoint_until_it_is_measured():
    """Reversal that was right at β = 1 is division by zero at β = 0, and rounding errors of β^-n above it."""
    batch, found = None, {}
    for memory in ("reverse", "store"):
        model = reversible_(zoo.made(zoo.llama, 8, torch.float32), memory=memory).train()
        batch = batch or zoo.batch_for(model)
        for beta in (0.1, 0.0):
            model.reversible.beta = beta
            found[memory, beta] = gradients_of(model, batch)
    for beta in (0.1, 0.0):
        assert_same(found["reverse", beta], found["store", beta], 1e-6)
    model = reversible_(zoo.made(zoo.llama))
    Retrofit(model, 10)
    assert (model.reversible.beta, model.reversible.used_memory) == (0, "checkpoint")


def test_an_end_below_one_is_measured_for_good():
    """Also of a net that was loaded: it begins under checkpoint, and reversal comes on when it is measured."""
    model = reversible_(zoo.made(zoo.llama), beta=0.9).train()
    retrofit, batch = Retrofit(model, 2, end=0.9, start=2, check_every=1), zoo.batch_for(model)
    assert model.reversible.used_memory == "checkpoint"
    for _ in range(4):
        model(**batch).loss.backward()
        retrofit.step()
    assert model.reversible.used_memory == "reverse"
    assert [made.beta for made in retrofit.history] == [0.9] * 3


def test_under_the_trainer(tmp_path):
    torch.manual_seed(0)
    model = reversible_(zoo.gpt2(3), beta=0.0)
    batch = zoo.batch_for(model)
    rows = [{name: value[i] for name, value in batch.items()} for i in range(2)]
    options = {"logging_steps": 4, "save_steps": 6, "report_to": "none", "use_cpu": True, "disable_tqdm": True}
    arguments = hf.TrainingArguments(tmp_path, max_steps=12, **options)
    retrofit = Retrofit(model, 8, check_every=2)
    trainer = hf.Trainer(model, arguments, train_dataset=rows, callbacks=[retrofit.callback()])
    trainer.train()
    assert retrofit.beta == 1.0
    logged = [row for row in trainer.state.log_history if "loss" in row]
    assert [row["beta"] for row in logged] == [0.5, 1.0, 1.0]
    assert logged[-1]["gradient_error"] < 1e-2
    model = reversible_(zoo.gpt2(3), beta=0.0)
    again = Retrofit(model, 8)
    trainer = hf.Trainer(model, arguments, train_dataset=rows, callbacks=[again.callback()])
    trainer.add_callback(betas := Betas())
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-6"))
    assert betas.seen == [0.75, 0.875, 1, 1, 1, 1]  # goes on where it was


class Betas(hf.TrainerCallback):
    """β in each step."""

    def __init__(self):
        self.seen = []

    def on_step_begin(self, args, state, control, model=None, **kwargs):
        self.seen.append(model.reversible.beta)


@pytest.mark.parametrize("end", [0.9, 1.0])
def test_fine_tuning_ends_where_the_original_ends(monkeypatch, end):
    """Within 2 %; `examples/retrofit.py` on its defaults is the same with a larger net."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    sys.modules.pop("retrofit", None)
    import retrofit

    plain, mine, apart, made = retrofit.compare(depth=3, width=32, length=32, pretrain=150, steps=200, rise=60, end=end)
    assert apart <= 1e-5
    assert mine <= 1.02 * plain
    assert made.beta == end
    assert made.history[-1].memory == "reverse"
