"""reversible_(model, bits=…): the layers of a model of Hugging Face as they are, reversible in training by a little noise."""

import copy
import io

import peft
import pytest
import torch
import torch.distributed as dist
import transformers as hf
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import retrograde as rg
from retrograde.bench.meter import LiveBytes
from retrograde.integrations.transformers import checkpoint_, reversible_

from . import families, zoo

pytestmark = [pytest.mark.integrations, pytest.mark.filterwarnings("ignore")]
TWO = ("t5", "longt5", "bart", "pegasus", "whisper", "wav2vec2", "clip", "mllama")  # lists of layers
REFUSED = {
    **dict.fromkeys(TWO, "lists of layers"),
    **dict.fromkeys(("bloom", "swin"), "more than the hidden states"),
    "deberta": "output_hidden_states is not there",  # which it always asks for
    "qwen2_moe": "output_router_logits is not there",
}
TAKEN = [name for name in families.FAMILIES if name not in REFUSED]
TRAIN_IN_EVAL = [name for name in TAKEN if name != "rwkv"]  # which has no gradients there


def step(model, batch):
    """The loss and all gradients."""
    model.zero_grad()
    torch.manual_seed(1)  # dropout, and the signs
    out = model(**batch)
    loss = out.loss if getattr(out, "loss", None) is not None else out[0].square().mean()
    loss.backward()
    return {"loss": loss.detach()} | {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_equal(found, true, apart=0.0):
    assert found.keys() == true.keys()
    assert sum(bool(value.abs().max() > 1e-9) for value in true.values()) > len(true) / 2
    assert {name: float((found[name] - t).abs().max()) for name, t in true.items() if (found[name] - t).abs().max() > apart} == {}


@pytest.mark.parametrize("name", TAKEN)
def test_gradients_and_eval(name):
    """With dropout, gradients of `store` to the bit; eval is the plain model to the bit."""
    model, batch = families.made(name, torch.float32)
    plain = copy.deepcopy(model).eval()
    keys = list(model.state_dict())
    assert reversible_(model, bits=4) is model
    assert list(model.state_dict()) == keys
    found = {}
    for model.reversible.memory in ("store", "checkpoint", "reverse"):
        found[model.reversible.memory] = step(model, batch)
    assert_equal(found["reverse"], found["store"])
    assert_equal(found["checkpoint"], found["store"])
    model.eval()
    assert torch.equal(model(**batch)[0], plain(**batch)[0])
    if name in TRAIN_IN_EVAL:
        assert_equal(step(model, batch), step(plain, batch))


@pytest.mark.parametrize("name", TRAIN_IN_EVAL)
def test_little_noise_is_nearly_the_plain_model(name):
    """At 8 bits, without dropout: the loss to 0.5 %, gradients to a cosine of 0.999."""
    model, batch = families.made(name, torch.float32)
    plain = copy.deepcopy(model.eval())
    reversible_(model, bits=8).reversible.owner.training = True
    true, found = step(plain, batch), step(model, batch)
    assert found.keys() == true.keys()
    assert float(found["loss"]) == pytest.approx(float(true["loss"]), rel=5e-3)
    assert not torch.equal(found["loss"], true["loss"])
    grads = [torch.cat([g.flatten() for n, g in made.items() if n != "loss"]) for made in (found, true)]
    assert torch.cosine_similarity(*grads, dim=0) > 0.999


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    model, batch = families.made(name, torch.float32)
    with pytest.raises(rg.ProgramError, match=REFUSED[name]):
        step(reversible_(model, bits=4), batch)


def test_an_encoder_and_a_decoder():
    """One after the other. What the encoder made is a side input of the decoder."""
    model, batch = families.made("bart", torch.float32)
    for part in (model.model.encoder, model.model.decoder):
        reversible_(part, bits=4)
    found = {}
    for memory in ("store", "reverse"):
        model.model.encoder.reversible.memory = model.model.decoder.reversible.memory = memory
        found[memory] = step(model, batch)
    assert_equal(found["reverse"], found["store"])


@pytest.mark.parametrize("make", [zoo.llama, zoo.bert], ids=lambda make: make.__name__)
def test_saved_as_a_plain_model(make, tmp_path):
    plain = zoo.made(make, dtype=torch.float32)
    plain.save_pretrained(tmp_path / "plain")
    model = reversible_(plain, bits=4)
    batch = zoo.batch_for(model)
    model.save_pretrained(tmp_path / "ours")
    for file in ("config.json", "model.safetensors"):
        assert (tmp_path / "ours" / file).read_bytes() == (tmp_path / "plain" / file).read_bytes()
    step(model, batch)
    torch.optim.SGD(model.parameters(), 0.1).step()
    model.save_pretrained(tmp_path / "ours")
    loaded = type(zoo.made(make)).from_pretrained(tmp_path / "ours")
    assert torch.equal(loaded.eval()(**batch).logits, model.eval()(**batch).logits)


@pytest.mark.parametrize("make", [zoo.llama, zoo.qwen2, zoo.gpt2], ids=lambda make: make.__name__)
def test_generate(make):
    plain = zoo.made(make).eval()
    model = reversible_(copy.deepcopy(plain), bits=4)
    batch = zoo.batch_for(plain)
    del batch["labels"]
    options = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
    assert torch.equal(model.generate(**batch, **options), plain.generate(**batch, **options))
    model.train()  # with noise, as with dropout, and with the cache
    assert model.generate(**batch, **options).shape == (2, zoo.LENGTH + 6)
    with torch.no_grad():
        cache = model(**batch, use_cache=True).past_key_values
    assert cache.get_seq_length() == zoo.LENGTH
    assert not model(**batch).past_key_values
    with pytest.raises(rg.ProgramError, match="KV cache was given"):
        model(**batch, past_key_values=cache)
    model.eval()
    assert model(**batch, output_hidden_states=True, use_cache=True).hidden_states


def with_lora(model):
    torch.manual_seed(2)
    settings = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.1, init_lora_weights=False)
    return peft.get_peft_model(model, settings)


def test_lora_before_and_after(tmp_path):
    plain = zoo.made(zoo.llama, dtype=torch.float32)
    batch = zoo.batch_for(plain)
    after = with_lora(reversible_(copy.deepcopy(plain), bits=4)).train()
    before = reversible_(with_lora(copy.deepcopy(plain)), bits=4).train()
    assert_equal(step(after, batch), step(before, batch))
    found = step(before, batch)
    before.reversible.memory = "store"
    assert_equal(found, step(before, batch))
    assert len(found) == 1 + 3 * 4
    after.save_pretrained(tmp_path / "adapter")
    loaded = peft.PeftModel.from_pretrained(copy.deepcopy(plain), tmp_path / "adapter").eval()
    assert torch.equal(loaded(**batch).logits, after.eval()(**batch).logits)
    after.merge_and_unload().save_pretrained(tmp_path / "merged")
    merged = hf.LlamaForCausalLM.from_pretrained(tmp_path / "merged").eval()
    torch.testing.assert_close(merged(**batch).logits, loaded(**batch).logits)


def test_bytes_per_layer():
    """Half a byte per element and layer; nothing for lower layers that are frozen."""

    def kept(depth, trained):
        model = reversible_(zoo.made(zoo.llama, depth, torch.float32), bits=4).train().requires_grad_(False)
        for layer in model.model.layers[-trained:]:
            layer.requires_grad_()
        batch = {"input_ids": torch.randint(3, zoo.VOCABULARY, (8, 32)), "attention_mask": torch.ones(8, 32, dtype=torch.long)}
        model(**batch).logits.sum().backward()
        with LiveBytes() as meter:
            out = model(**batch).logits.sum()
            found = meter.live
        out.backward()
        return found

    layer = 8 * 32 * zoo.WIDTH // 2
    assert kept(12, 12) - kept(4, 4) == 8 * layer
    assert kept(12, 4) - kept(4, 4) < layer


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sixteen_bits(dtype):
    """Under bf16 autocast and in bf16 weights."""
    model, batch = families.made("llama", dtype)
    reversible_(model, bits=4)
    found = {}
    for model.reversible.memory in ("store", "reverse"):
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.float32):
            found[model.reversible.memory] = step(model, batch)
    assert_equal(found["reverse"], found["store"])


def test_copies_and_pickles():
    model, batch = families.made("falcon", torch.float32)  # its layers return tuples
    true = step(reversible_(model, bits=4), batch)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        assert_equal(step(other, batch), true)
        assert other.reversible.layers[0] is other.transformer.h[0] is not model.transformer.h[0]


@pytest.fixture
def group(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_ddp_and_fsdp(group):
    model, batch = families.made("llama", torch.float32)
    true = step(reversible_(model, bits=4), batch)
    found = step(torch.nn.parallel.DistributedDataParallel(copy.deepcopy(model)), batch)
    assert_equal({name.removeprefix("module."): value for name, value in found.items()}, true)
    for layer in model.model.layers:
        fully_shard(layer, mesh=group)
    fully_shard(model, mesh=group)
    found = step(model, batch)
    found = {name: value.full_tensor() if hasattr(value, "full_tensor") else value for name, value in found.items()}
    assert_equal(found, true, apart=1e-5)  # other addresses, other rounding


def test_compile():
    model, batch = families.made("llama", torch.float32)
    true = step(reversible_(model, bits=4), batch)
    torch.compiler.reset()
    compiled = torch.compile(model, backend="aot_eager")
    found = step(compiled, batch)
    assert_equal({name.removeprefix("_orig_mod."): value for name, value in found.items()}, true)
    torch.compiler.reset()
    with pytest.raises(Exception, match=r"reversible_.*fullgraph=True"):  # torch wraps it
        step(torch.compile(model, backend="aot_eager", fullgraph=True), batch)
    for layer in model.model.layers:
        layer.compile(backend="aot_eager")
    found = step(model, batch)
    model.reversible.memory = "store"
    assert_equal(found, step(model, batch))


def test_trainer(tmp_path):
    """One repeated batch, with accumulation, clipping and autocast."""
    torch.manual_seed(0)
    model = reversible_(zoo.llama(4), bits=4)
    batch = zoo.batch_for(model, size=4)
    rows = [{name: value[i] for name, value in batch.items()} for i in range(4)]
    sizes = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "max_steps": 30, "learning_rate": 3e-2}
    quiet = {"report_to": "none", "use_cpu": True, "disable_tqdm": True, "dataloader_pin_memory": False, "logging_steps": 1}
    arguments = hf.TrainingArguments(tmp_path, lr_scheduler_type="constant", bf16=True, save_steps=30, **sizes, **quiet)
    trainer = hf.Trainer(model, arguments, train_dataset=rows)
    trainer.train()
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    assert losses[-1] <= 0.7 * losses[0]
    saved = hf.LlamaForCausalLM.from_pretrained(tmp_path / "checkpoint-30").state_dict()
    assert all(torch.equal(saved[name], t) for name, t in model.state_dict().items())


def test_bits_may_be_set_at_any_time():
    model, batch = families.made("gpt2", torch.float32)
    plain = step(copy.deepcopy(model), batch)
    reversible_(model, bits=4)
    losses = {bits: float(step(model, batch)["loss"]) for model.reversible.bits in (2, 4) for bits in [model.reversible.bits]}
    assert losses[2] != losses[4]
    model.reversible.bits = None
    for model.reversible.memory in ("reverse", "checkpoint"):
        assert_equal(step(model, batch), plain, apart=1e-5)
    with pytest.raises(rg.ProgramError, match="bits must be a whole number from 1 to 8"):
        model.reversible.bits = 9
    assert "3 layers, bits=None, memory='checkpoint'" in repr(model)


def massive(factor):
    """From the second layer on, one channel is so many times as large as the others. Norms above make up for it."""
    torch.manual_seed(0)
    model, seen = zoo.llama(4).eval(), []
    batch, second = zoo.batch_for(model), model.model.layers[1]
    handle = second.register_forward_hook(lambda _, __, out: seen.append(out.abs().flatten(0, 1).amax(0)))
    with torch.no_grad():
        second.mlp.down_proj.weight[3] *= 1000
        model(**batch)
        second.mlp.down_proj.weight[3] *= factor * seen[0].median() / seen[0][3]
        for norm in [*model.model.layers[2:].modules(), model.model.norm]:
            if type(norm).__name__ == "LlamaRMSNorm":
                norm.weight *= factor / 4
                norm.weight[3] = 1 / 4
        model(**batch)
    handle.remove()
    return model.train(), batch, float(seen[1][3] / seen[1].median())


def test_massive_activations():
    """A thousand times the others: it trains. Beyond the range: an error that names the layer and the way out."""
    model, batch, ratio = massive(1000)
    assert 900 < ratio < 1100
    reversible_(model, bits=4)
    found = {}
    for model.reversible.memory in ("store", "reverse"):
        found[model.reversible.memory] = step(model, batch)
    assert_equal(found["reverse"], found["store"])
    optimizer, losses = torch.optim.AdamW(model.parameters(), 1e-2), []
    for _ in range(30):
        losses.append(float(step(model, batch)["loss"]))
        optimizer.step()
    assert losses[-1] < 0.7 * losses[0]
    model, batch, _ = massive(10**7)
    reversible_(model, bits=4)
    with pytest.raises(rg.OutOfRange, match=r"update 1: .* = LlamaDecoderLayer.*±32766.*bits=None.*'checkpoint' or 'offload'"):
        step(model, batch)
    model.reversible.bits, model.reversible.memory = None, "checkpoint"
    assert step(model, batch)["loss"].isfinite()


def test_clear_errors():
    model, batch = families.made("llama", torch.float32)
    reversible_(model, bits=4)
    for name in ("output_hidden_states", "output_attentions"):
        with pytest.raises(rg.ProgramError, match=f"{name} is not there"):
            model(**batch, **{name: True})
    with pytest.raises(rg.ProgramError, match="no activations to checkpoint"):
        model.gradient_checkpointing_enable()
    model.gradient_checkpointing_disable()
    for again in (lambda: reversible_(model, bits=4), lambda: reversible_(model)):
        with pytest.raises(rg.ProgramError, match="is reversible already"):
            again()
    with pytest.raises(rg.ProgramError, match="gradient checkpointing is on"):
        reversible_(checkpoint_(zoo.llama(2), "checkpoint"), bits=4)
    with pytest.raises(rg.ProgramError, match="has no list of layers"):
        reversible_(torch.nn.Linear(2, 2), bits=4)
    with pytest.raises(rg.ProgramError, match="bits must be"):
        reversible_(zoo.llama(2), bits=0)
    with pytest.raises(rg.ProgramError, match="trained in two streams"):
        reversible_(hf.LlamaForCausalLM(reversible_(zoo.llama(2)).config), bits=4)
    with pytest.raises(rg.ProgramError, match="arithmetic"):
        reversible_(zoo.llama(2), bits=4, arithmetic="float")
    fewer = reversible_(zoo.made(zoo.llama), bits=4).train()
    fewer.config.num_hidden_layers = 2
    with pytest.raises(rg.ProgramError, match="called 2 of its 3"):
        fewer(**batch)
    skipping, texts = families.made("opt", torch.float32)
    reversible_(skipping, bits=4).model.decoder.layerdrop = 0.99
    with pytest.raises(rg.ProgramError, match=r"in another order|called 0 of"):
        skipping(**texts)
    step(model, batch)  # after all of which it works
