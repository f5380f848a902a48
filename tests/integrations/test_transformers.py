"""Models of Hugging Face, made reversible in place."""

import copy
import io
import logging

import pytest
import torch
import transformers as hf

import retrograde as rg
from retrograde.bench.meter import LiveBytes
from retrograde.integrations.transformers import reversible_

from . import zoo

pytestmark = pytest.mark.integrations


def gradients_of(model, batch):
    model.zero_grad()
    torch.manual_seed(1)  # dropout
    out = model(**batch)
    out.loss.backward()
    return {"loss": out.loss.detach(), "logits": out.logits.detach()} | {
        name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None
    }


def assert_same(found, true, tolerance=1e-9):
    assert found.keys() == true.keys()
    for name, value in true.items():
        scale = max(float(value.norm()), 1e-6)  # less is rounding, where the true gradient is zero
        assert float((found[name] - value).norm()) / scale <= tolerance, name


@pytest.mark.parametrize("make", zoo.ALL, ids=lambda make: make.__name__)
def test_gradients_are_those_of_store(make):
    """In float64, in training mode with dropout; all layers get gradients that are not zero."""
    model = reversible_(zoo.made(make))
    model.train()
    batch = zoo.batch_for(model)
    found = {}
    for memory in ("store", "checkpoint", "reverse", rg.StoreLast(2)):
        model.reversible.memory = memory
        found[memory] = gradients_of(model, batch)
    assert len(found["store"]) - 2 >= sum(1 for _ in model.parameters()) - 2  # BERT and ViT have none for a pooler
    for name, value in found["store"].items():
        assert value.norm() > 1e-9 or "k_proj.bias" in name or "key.bias" in name, name  # a shift of all keys changes nothing
    for memory in ("checkpoint", "reverse", rg.StoreLast(2)):
        assert_same(found[memory], found["store"])


def masks_and_rope(model, batch):
    """What Llama and Qwen give their layers."""
    ids, mask = batch["input_ids"], batch["attention_mask"]
    embeds = model.model.embed_tokens(ids)
    positions = torch.arange(ids.shape[1])[None]
    given = {"config": model.config, "inputs_embeds": embeds, "attention_mask": mask, "past_key_values": None}
    full = hf.masking_utils.create_causal_mask(**given, position_ids=positions)
    masks = {"full_attention": full}
    if "sliding_attention" in (getattr(model.config, "layer_types", None) or ()):
        masks["sliding_attention"] = hf.masking_utils.create_sliding_window_causal_mask(**given, position_ids=positions)
    return embeds, masks, model.model.rotary_emb(embeds, positions)


@pytest.mark.parametrize("make", [zoo.llama, zoo.qwen2, zoo.qwen3], ids=lambda make: make.__name__)
def test_equations_by_hand(make):
    """x1 += attention(norm(x2)), x2 += mlp(norm(x1)), each layer with its own mask."""
    plain = zoo.made(make).eval()
    model = reversible_(copy.deepcopy(plain))
    batch = zoo.batch_for(plain)
    embeds, masks, rope = masks_and_rope(plain, batch)
    kinds = getattr(plain.config, "layer_types", None) or ["full_attention"] * 3
    x1 = x2 = embeds
    for kind, layer in zip(kinds, plain.model.layers, strict=True):
        x1 = x1 + layer.self_attn(layer.input_layernorm(x2), attention_mask=masks[kind], position_embeddings=rope)[0]
        x2 = x2 + layer.mlp(layer.post_attention_layernorm(x1))
    logits = plain.lm_head(plain.model.norm((x1 + x2) / 2))
    out = model(**batch)
    assert torch.allclose(out.logits, logits, rtol=1e-9, atol=1e-12)
    plain.loss_function(logits, batch["labels"], vocab_size=zoo.VOCABULARY).backward()
    out.loss.backward()
    for (name, p), (_, q) in zip(plain.named_parameters(), model.named_parameters(), strict=True):
        assert torch.allclose(q.grad, p.grad, rtol=1e-8, atol=1e-12), name
    if len(masks) > 1:
        model.config.layer_types = ["full_attention"] * 3  # the masks do differ
        assert not torch.allclose(model(**batch).logits, logits)


def test_bert_by_hand():
    """Post-norm: LayerNorm is on what is added."""
    plain = zoo.made(zoo.bert).eval()
    model = reversible_(copy.deepcopy(plain))
    ids = torch.randint(3, zoo.VOCABULARY, (2, zoo.LENGTH))
    x1 = x2 = plain.bert.embeddings(ids)
    for layer in plain.bert.encoder.layer:
        out = layer.attention.output
        x1 = x1 + out.LayerNorm(out.dense(layer.attention.self(x2)[0]))
        x2 = x2 + layer.output.LayerNorm(layer.output.dense(layer.intermediate(x1)))
    assert torch.allclose(model(ids).logits, plain.cls((x1 + x2) / 2), rtol=1e-9)


@pytest.mark.parametrize("make", [zoo.gpt2, zoo.vit], ids=lambda make: make.__name__)
def test_others_by_hand(make):
    plain = zoo.made(make).eval()
    model = reversible_(copy.deepcopy(plain))
    batch = zoo.batch_for(plain)
    batch.pop("attention_mask", None)
    layers = plain.transformer.h if make is zoo.gpt2 else plain.vit.layers
    given = {}
    layers[0].register_forward_pre_hook(lambda _, args: given.setdefault("x", args[0]))
    plain(**batch)
    x1 = x2 = given["x"]
    for layer in layers:
        if make is zoo.gpt2:
            x1 = x1 + layer.attn(layer.ln_1(x2))[0]
            x2 = x2 + layer.mlp(layer.ln_2(x1))
        else:
            x1 = x1 + layer.attention(layer.layernorm_before(x2))[0]
            x2 = x2 + layer.mlp(layer.layernorm_after(x1))
    x = (x1 + x2) / 2
    logits = plain.lm_head(plain.transformer.ln_f(x)) if make is zoo.gpt2 else plain.classifier(plain.vit.layernorm(x)[:, 0])
    assert torch.allclose(model(**batch).logits, logits, rtol=1e-9)


@pytest.mark.parametrize("make", zoo.ALL, ids=lambda make: make.__name__)
def test_save_and_load(make, tmp_path):
    plain = zoo.made(make)
    keys = list(plain.state_dict())
    model = reversible_(plain).eval()
    assert list(model.state_dict()) == keys
    batch = zoo.batch_for(model)
    model.save_pretrained(tmp_path)
    loaded = type(zoo.made(make)).from_pretrained(tmp_path, dtype=torch.float64).eval()
    assert loaded.config.retrograde == {"streams": 2}
    assert not torch.allclose(loaded(**batch).logits, model(**batch).logits)  # in one stream: another function
    assert all(map(torch.equal, loaded.state_dict().values(), model.state_dict().values()))
    torch.testing.assert_close(reversible_(loaded)(**batch).logits, model(**batch).logits)


@pytest.mark.parametrize("make", zoo.DECODERS, ids=lambda make: make.__name__)
def test_generate_with_and_without_cache(make):
    """The same tokens and logits, also where the window has slid and a text is padded on the left."""
    model = reversible_(zoo.made(make)).eval()
    batch = zoo.batch_for(model)
    del batch["labels"]
    options = {
        "max_new_tokens": 8,
        "do_sample": False,
        "eos_token_id": None,
        "return_dict_in_generate": True,
        "output_logits": True,
    }
    cached = model.generate(**batch, **options)
    assert cached.past_key_values.get_seq_length() == zoo.LENGTH + 7
    plain = model.generate(**batch, **options, use_cache=False)
    assert torch.equal(cached.sequences, plain.sequences)
    torch.testing.assert_close(torch.stack(cached.logits), torch.stack(plain.logits))


def test_static_cache():
    """A cache that is written in place."""
    model = reversible_(zoo.made(zoo.llama)).eval()
    ids = torch.randint(3, zoo.VOCABULARY, (2, 5))
    cache = hf.StaticCache(config=model.config, max_cache_len=8)
    with torch.no_grad():
        model(ids[:, :4], past_key_values=cache)
        last = model(ids[:, 4:], past_key_values=cache).logits
        assert torch.allclose(last[:, -1], model(ids).logits[:, -1])


def test_the_cache_is_dropped_while_gradients_are_recorded():
    model = reversible_(zoo.made(zoo.llama))
    ids = torch.randint(3, zoo.VOCABULARY, (2, 5))
    assert model(ids, use_cache=True).past_key_values is None
    assert model(ids, past_key_values=hf.DynamicCache(config=model.config)).past_key_values is None
    with torch.no_grad():
        cache = model(ids).past_key_values
    assert cache.get_seq_length() == 5
    with pytest.raises(rg.ProgramError, match="a filled KV cache"):
        model(ids, past_key_values=cache)
    with pytest.raises(rg.ProgramError, match="a KV cache was given"):
        model.model(ids, None, None, cache)


@pytest.mark.parametrize("make", [zoo.llama, zoo.qwen2, zoo.gpt2, zoo.bert, zoo.vit], ids=lambda make: make.__name__)
def test_memory_is_flat_in_depth(make):
    def peak(depth, memory):
        model = reversible_(zoo.made(make, depth, torch.float32), memory=memory)
        batch = zoo.batch_for(model, size=8)
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        model(**batch).loss.backward()
        with LiveBytes() as meter:
            model(**batch).loss.backward()
        return meter.peak

    shallow, deep = peak(4, "reverse"), peak(16, "reverse")
    assert deep < 1.05 * shallow
    assert peak(16, "store") > 2 * peak(4, "store")  # the meter would have seen it


@pytest.mark.parametrize("make", [zoo.llama, zoo.qwen2, zoo.gpt2, zoo.bert, zoo.vit], ids=lambda make: make.__name__)
def test_trainer_lowers_the_loss(make, tmp_path):
    """One repeated batch, 30 steps: by at least 30 %. With accumulation, clipping and a checkpoint."""
    torch.manual_seed(0)
    model = reversible_(make(4))
    batch = zoo.batch_for(model, size=4)
    rows = [{name: value[i] for name, value in batch.items()} for i in range(4)]
    options = {"max_steps": 30, "learning_rate": 3e-2, "lr_scheduler_type": "constant", "logging_steps": 1, "report_to": "none"}
    arguments = hf.TrainingArguments(
        tmp_path,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        max_grad_norm=1.0,
        bf16=make is zoo.llama,  # mixed precision
        save_steps=30,
        use_cpu=True,
        disable_tqdm=True,
        dataloader_pin_memory=False,
        **options,
    )
    trainer = hf.Trainer(model, arguments, train_dataset=rows)
    trainer.train()
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    assert losses[-1] <= 0.7 * losses[0]
    assert (tmp_path / "checkpoint-30" / "model.safetensors").exists()


def test_sixteen_bits_are_exact():
    """Under bf16 autocast and in bf16 weights gradients are those of store to the bit."""
    for dtype, cast in ((torch.float32, True), (torch.bfloat16, False)):
        model = reversible_(zoo.made(zoo.llama, 4, dtype)).train()
        batch, found = zoo.batch_for(model), {}
        for model.reversible.memory in ("store", "reverse"):
            with torch.autocast("cpu", torch.bfloat16, enabled=cast):
                found[model.reversible.memory] = gradients_of(model, batch)
        assert all(torch.equal(found["store"][name], value) for name, value in found["reverse"].items())


def test_copies_and_pickles():
    model = reversible_(zoo.made(zoo.gpt2)).eval()
    batch = zoo.batch_for(model)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        assert torch.equal(other(**batch).logits, model(**batch).logits)
        assert other.reversible.layers[0] is other.transformer.h[0] is not model.transformer.h[0]
        with torch.no_grad():
            other.transformer.h[0].mlp.c_proj.bias += 1
        assert not torch.equal(other(**batch).logits, model(**batch).logits)


def test_exchanged_parts_and_hooks():
    """A child that was exchanged is used; hooks of a layer run around its parts."""
    model = reversible_(zoo.made(zoo.llama))
    batch = zoo.batch_for(model)
    before = gradients_of(model.eval(), batch)
    seen = []
    model.model.layers[1].register_forward_hook(lambda *_: seen.append(1))
    assert_same(gradients_of(model, batch), before)
    assert len(seen) == 4  # f and g, twice
    layer = model.model.layers[0]
    layer.mlp = copy.deepcopy(layer.mlp)
    with torch.no_grad():
        layer.mlp.down_proj.weight *= 2
    assert not torch.equal(model(**batch).logits, before["logits"])


def test_frozen_layers_and_lora_like_use():
    """Only some parameters train; the input of the stack needs no grad."""
    model = reversible_(zoo.made(zoo.llama)).eval()
    batch = zoo.batch_for(model)
    model.requires_grad_(False)
    model.model.layers[1].self_attn.q_proj.weight.requires_grad_()
    found = {}
    for model.reversible.memory in ("store", "reverse"):
        found[model.reversible.memory] = gradients_of(model, batch)
    assert len(found["store"]) == 3
    assert_same(found["reverse"], found["store"])


def test_clear_errors():
    model = reversible_(zoo.made(zoo.bert))
    batch = zoo.batch_for(model)
    model.set_attn_implementation("eager")  # the one that has attentions to give
    for name in ("output_hidden_states", "output_attentions"):
        with pytest.raises(rg.ProgramError, match=f"{name} is not there"):
            model(**batch, **{name: True})
        setattr(model.config, name, True)
        with pytest.raises(rg.ProgramError, match=f"{name} is not there"):
            model(**batch)
        setattr(model.config, name, False)
    with pytest.raises(rg.ProgramError, match="no activations to checkpoint"):
        model.gradient_checkpointing_enable()
    model.gradient_checkpointing_disable()
    with pytest.raises(rg.ProgramError, match="is reversible already"):
        reversible_(model)
    with pytest.raises(rg.ProgramError, match=r"known: BertLayer, GPT2Block"):
        reversible_(torch.nn.Linear(2, 2))
    with pytest.raises(rg.ProgramError, match="cannot be called alone"):
        model.bert.encoder.layer[0](torch.zeros(1, 2, zoo.WIDTH))
    with pytest.raises(rg.ProgramError, match="unknown memory policy"):
        reversible_(zoo.made(zoo.llama), memory="rewind")
    checkpointed = zoo.made(zoo.llama)
    checkpointed.gradient_checkpointing_enable()
    with pytest.raises(rg.ProgramError, match="gradient checkpointing is on"):
        reversible_(checkpointed)
    fewer = reversible_(zoo.made(zoo.llama))
    fewer.config.num_hidden_layers = 2
    with pytest.raises(rg.ProgramError, match="called 2 of its 3"):
        fewer(**batch)
    gradients_of(model, batch)  # after all of which it works


def test_it_is_said_that_the_function_is_another(tmp_path, caplog):
    zoo.made(zoo.llama).save_pretrained(tmp_path)
    with caplog.at_level(logging.INFO, "retrograde"):
        model = reversible_(hf.LlamaForCausalLM.from_pretrained(tmp_path))
    assert "another function" in caplog.text
    assert caplog.records[0].levelno == logging.WARNING
    assert "reversible: 3 layers, memory='reverse'" in repr(model)


def test_streams_are_noted_in_a_config_of_its_own():
    """Plain models of the same config object are not marked."""
    config = zoo.llama(2).config
    first, plain = (hf.LlamaForCausalLM(config) for _ in range(2))
    reversible_(first)
    assert first.config.retrograde == {"streams": 2}
    assert not hasattr(plain.config, "retrograde")
    inside = [module.config for module in first.modules() if hasattr(module, "config")]
    assert len(inside) > 4
    assert all(one is first.config for one in inside)
    plain.config.retrograde = {"beta": 0.9}
    with pytest.raises(rg.ProgramError, match="a mixture of one stream and two"):
        reversible_(plain)


@pytest.mark.parametrize("make", [zoo.llama, zoo.bert, zoo.vit], ids=lambda make: make.__name__)
def test_check_takes_a_reversible_model(make):
    """No rg.Reversible is inside: its programs are found by running it. Ids and masks of later steps are valid."""
    model = reversible_(zoo.made(make))
    model.train()
    batch = zoo.batch_for(model)
    state, random = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    report = rg.check.gradients(model, **batch)
    assert (report.ok, report.findings, report.notes, report.steps) == (True, [], [], 3), str(report)
    assert report.replayed == 6
    assert report.recovered > 0, "under its own policy"
    assert report.worst < 1e-9  # 0 where norms compute in float32
    assert len(rg.check.drift(model, **batch).rows) == 6
    assert all(torch.equal(t, state[name]) for name, t in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random)


def test_check_names_the_layer_at_fault():
    class Averaging(torch.nn.Module):
        """Its average is right in the first batch."""

        def __init__(self, mlp):
            super().__init__()
            self.mlp, self.mean = mlp, None

        def forward(self, x):
            y = self.mlp(x)
            mean = y.detach().mean((0, 1))
            self.mean = mean if self.mean is None else 0.9 * self.mean + 0.1 * mean
            return y - self.mean

    model = reversible_(zoo.made(zoo.llama))
    model.model.layers[1].mlp = Averaging(model.model.layers[1].mlp)
    report = rg.check.gradients(model, **zoo.batch_for(model))
    (finding,) = report.findings
    assert not report.ok
    assert (finding.kind, finding.where.split(":")[0], finding.code.split(" =")[0]) == ("stateful", "update 3", "self.mean")
