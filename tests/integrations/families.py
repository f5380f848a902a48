"""Tiny models of many architectures of Hugging Face, each with a batch: whatever supports activation checkpointing."""

import torch
import transformers as hf
from transformers.models.llama4.configuration_llama4 import Llama4VisionConfig
from transformers.models.mllama.configuration_mllama import MllamaTextConfig, MllamaVisionConfig

from . import zoo
from .zoo import DECODER, LENGTH, SHARED, TEXT, VOCABULARY, WIDTH

ENDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
BOTH = {
    "d_model": WIDTH, "vocab_size": VOCABULARY, "max_position_embeddings": 32, "decoder_start_token_id": 1,
    "encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 24,
    "decoder_layers": 2, "decoder_attention_heads": 2, "decoder_ffn_dim": 24, **ENDS,
}  # fmt: skip
T5 = {"d_model": WIDTH, "d_kv": 8, "d_ff": 24, "num_heads": 2, "num_layers": 2, "vocab_size": VOCABULARY}
IMAGE = {"image_size": 8, "patch_size": 4, "num_channels": 3, "num_labels": 5}
MIXED = {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 4, "head_dim": 8}
SHARED_KEYS = {"num_kv_shared_layers": 2, "vocab_size_per_layer_input": VOCABULARY, "hidden_size_per_layer_input": 4, **MIXED}


def ids():
    return torch.randint(3, VOCABULARY, (2, LENGTH))


def text(padded=True):
    given = ids()
    mask = torch.ones_like(given)
    if padded:
        mask[1, :3] = 0
    return {"input_ids": given, "attention_mask": mask, "labels": given.masked_fill(mask == 0, -100)}


def pixels(size=8):
    return {"pixel_values": torch.randn(2, 3, size, size), "labels": torch.tensor([1, 2])}


def _model(kind, sizes, config):
    return getattr(hf, kind)(getattr(hf, config)(**sizes))


def _decoder(name, padded=True, of="Config", **own):
    sizes = {"num_hidden_layers": 3, **DECODER, **own}
    return lambda: (_model(f"{name}ForCausalLM", sizes, name + of), text(padded))


def _pairs(name, **sizes):
    return lambda: (_model(f"{name}ForConditionalGeneration", sizes, f"{name}Config"), {"input_ids": ids(), "labels": ids()})


def _masked(name, **own):
    sizes = {"num_hidden_layers": 3, **TEXT, **own}
    return lambda: (_model(f"{name}ForMaskedLM", sizes, f"{name}Config"), text())


def _recurrent(name, **own):
    sizes = {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "num_hidden_layers": 3, **own}
    return lambda: (_model(f"{name}ForCausalLM", sizes, f"{name}Config"), {"input_ids": ids(), "labels": ids()})


def _of_zoo(make):
    def made():
        model = make(3)
        return model, zoo.batch_for(model)

    return made


def whisper():
    config = hf.WhisperConfig(**BOTH, max_source_positions=20, max_target_positions=32, num_mel_bins=8)
    return hf.WhisperForConditionalGeneration(config), {"input_features": torch.randn(2, 8, 40), "labels": ids()}


def wav2vec2():
    front = {"conv_dim": (8, 8), "conv_stride": (4, 4), "conv_kernel": (8, 8)}
    sizes = {"vocab_size": VOCABULARY, "num_hidden_layers": 3, "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2}
    config = hf.Wav2Vec2Config(mask_time_prob=0.0, layerdrop=0.0, pad_token_id=0, **SHARED, **front, **sizes)
    return hf.Wav2Vec2ForCTC(config), {"input_values": torch.randn(2, 800), "labels": torch.randint(1, VOCABULARY, (2, 5))}


def clip():
    both = {"num_hidden_layers": 2, "projection_dim": 8, **SHARED}
    words = {"vocab_size": VOCABULARY, "max_position_embeddings": 32, **ENDS, **both}
    picture = {"image_size": 8, "patch_size": 4, **both}
    model = hf.CLIPModel(hf.CLIPConfig(text_config=words, vision_config=picture, projection_dim=8))
    return model, {"input_ids": ids(), "pixel_values": torch.randn(2, 3, 8, 8), "return_loss": True}


def dinov2():
    config = hf.Dinov2Config(num_hidden_layers=3, drop_path_rate=0.3, **IMAGE, **SHARED)
    return hf.Dinov2ForImageClassification(config), pixels()


def swin():
    config = hf.SwinConfig(image_size=16, patch_size=2, embed_dim=8, depths=[2, 2], num_heads=[2, 2], window_size=4, num_labels=5)
    return hf.SwinForImageClassification(config), pixels(16)


def llama4_vision():
    """Its layers get all by keyword."""
    wide = dict.fromkeys(("intermediate_size", "vision_output_dim", "projector_input_dim", "projector_output_dim"), 4 * WIDTH)
    sizes = {"hidden_size": WIDTH, "num_attention_heads": 2, "num_hidden_layers": 3, "image_size": 8, "patch_size": 2, **wide}
    model = hf.Llama4VisionModel(Llama4VisionConfig(pixel_shuffle_ratio=0.5, **sizes))
    return model, {"pixel_values": torch.randn(2, 3, 8, 8)}


def sam_vision():
    sizes = {"hidden_size": WIDTH, "output_channels": 8, "num_hidden_layers": 3, "num_attention_heads": 2, "mlp_dim": 24}
    config = hf.SamVisionConfig(image_size=16, patch_size=4, global_attn_indexes=[1], window_size=2, **sizes)
    return hf.SamVisionModel(config), {"pixel_values": torch.randn(2, 3, 16, 16)}


def mllama():
    """A decoder with cross-attention to a picture. The layers of its picture half are not checkpointed by Hugging Face."""
    picture = MllamaVisionConfig(
        hidden_size=WIDTH, intermediate_size=24, attention_heads=2, num_hidden_layers=2, num_global_layers=1, image_size=8,
        patch_size=4, max_num_tiles=1, supported_aspect_ratios=[[1, 1]], intermediate_layers_indices=[0, 1],
        vision_output_dim=3 * WIDTH,
    )  # fmt: skip
    rope = {"rope_type": "default", "rope_theta": 1e4}
    words = MllamaTextConfig(num_hidden_layers=3, cross_attention_layers=[1], rope_parameters=rope, **DECODER)
    model = hf.MllamaForConditionalGeneration(hf.MllamaConfig(vision_config=picture, text_config=words, image_token_index=3))
    tiles = {"aspect_ratio_ids": torch.ones(2, 1, dtype=torch.long), "aspect_ratio_mask": torch.ones(2, 1, 1, dtype=torch.long)}
    given = {"cross_attention_mask": torch.ones(2, LENGTH, 1, 1, dtype=torch.long), **tiles, **text(padded=False)}
    return model, {"pixel_values": torch.randn(2, 1, 1, 3, 8, 8), **given}


EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16, "experts_implementation": "eager"}  # others know no float64
ALTUP = {"laurel_rank": 4, "altup_num_inputs": 2, "activation_sparsity_pattern": [0.0] * 4}

FAMILIES = {
    **{make.__name__: _of_zoo(make) for make in zoo.ALL},
    "gemma2": _decoder("Gemma2", padded=False, head_dim=8, sliding_window=4),
    "gemma3n": _decoder("Gemma3n", of="TextConfig", num_hidden_layers=4, **ALTUP, **SHARED_KEYS),  # layers share keys in a dict
    "gemma4": _decoder("Gemma4", of="TextConfig", num_hidden_layers=4, global_head_dim=8, **SHARED_KEYS),
    "phi": _decoder("Phi"),
    "llama4": _decoder("Llama4", of="TextConfig", num_local_experts=2, intermediate_size_mlp=24, head_dim=8),
    "mixtral": _decoder("Mixtral", num_local_experts=4, **EXPERTS),
    "qwen2_moe": _decoder("Qwen2Moe", num_experts=4, shared_expert_intermediate_size=16, output_router_logits=True, **EXPERTS),
    "opt": _decoder("OPT", ffn_dim=24, word_embed_proj_dim=WIDTH),
    "gpt_neox": _decoder("GPTNeoX"),
    "falcon": _decoder("Falcon", hidden_dropout=0.1),
    "bloom": _decoder("Bloom", padded=False),
    "mamba": _recurrent("Mamba", state_size=4),
    "rwkv": _recurrent("Rwkv", attention_hidden_size=WIDTH, context_length=32),
    "roberta": _masked("Roberta"),
    "deberta": _masked("DebertaV2", relative_attention=True, pos_att_type=["p2c", "c2p"]),
    "modernbert": _masked("ModernBert", **ENDS, cls_token_id=1, sep_token_id=2),
    "t5": _pairs("T5", decoder_start_token_id=0, **T5),
    "longt5": _pairs("LongT5", decoder_start_token_id=0, **T5, local_radius=3),
    "bart": _pairs("Bart", **BOTH),
    "pegasus": _pairs("Pegasus", **BOTH),
    **{make.__name__: make for make in (whisper, wav2vec2, clip, dinov2, swin, llama4_vision, sam_vision, mllama)},
}


def made(name, dtype=torch.float64):
    """A model in training mode with weights that are not near zero, and a batch."""
    torch.manual_seed(0)
    model, batch = FAMILIES[name]()
    model = model.to(dtype).train()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.2 * torch.randn_like(p))
    floats = {name: value.to(dtype) for name, value in batch.items() if torch.is_tensor(value) and value.is_floating_point()}
    return model, batch | floats
