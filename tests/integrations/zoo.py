"""Tiny models of Hugging Face with random weights, one for each architecture, and what to call them with."""

import torch
import transformers as hf

WIDTH, VOCABULARY, LENGTH = 16, 40, 9
SHARED = {"hidden_size": WIDTH, "intermediate_size": 24, "num_attention_heads": 2}
TEXT = {"vocab_size": VOCABULARY, "max_position_embeddings": 32, **SHARED}
DECODER = {"num_key_value_heads": 1, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, **TEXT}
SLIDING = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}


def llama(depth):
    return hf.LlamaForCausalLM(hf.LlamaConfig(num_hidden_layers=depth, attention_dropout=0.1, **DECODER))


def mistral(depth):
    return hf.MistralForCausalLM(hf.MistralConfig(num_hidden_layers=depth, sliding_window=4, head_dim=8, **DECODER))


def qwen2(depth):
    """Its first layer looks at everything, the others through a window."""
    return hf.Qwen2ForCausalLM(hf.Qwen2Config(num_hidden_layers=depth, **SLIDING, **DECODER))


def qwen3(depth):
    return hf.Qwen3ForCausalLM(hf.Qwen3Config(num_hidden_layers=depth, head_dim=8, **SLIDING, **DECODER))


def gpt2(depth):
    sizes = {"n_embd": WIDTH, "n_layer": depth, "n_head": 2, "n_positions": 32, "vocab_size": VOCABULARY}
    return hf.GPT2LMHeadModel(hf.GPT2Config(**sizes, bos_token_id=1, eos_token_id=2, pad_token_id=0))


def bert(depth):
    return hf.BertForMaskedLM(hf.BertConfig(num_hidden_layers=depth, **TEXT))


def vit(depth):
    sizes = {"image_size": 8, "patch_size": 4, "num_channels": 3, "num_labels": 5, "hidden_dropout_prob": 0.1}
    return hf.ViTForImageClassification(hf.ViTConfig(num_hidden_layers=depth, **sizes, **SHARED))


DECODERS = [llama, mistral, qwen2, qwen3, gpt2]
ALL = [*DECODERS, bert, vit]


def made(make, depth=3, dtype=torch.float64):
    """With weights that are not near zero: branches add about as much as is there."""
    torch.manual_seed(0)
    model = make(depth).to(dtype)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.2 * torch.randn_like(p))
    return model


def batch_for(model, size=2):
    """Inputs with labels; the second text is padded."""
    if model.config.model_type == "vit":
        return {"pixel_values": torch.randn(size, 3, 8, 8, dtype=model.dtype), "labels": torch.arange(size) % 5}
    ids = torch.randint(3, VOCABULARY, (size, LENGTH))
    mask = torch.ones_like(ids)
    if size > 1:
        mask[1, :3] = 0
        ids[1, :3] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}
