"""Keyword arguments of the tiny model of each family; `zoo.py` builds them.

Sizes are shared on purpose and small: hidden 32, vocabulary 96, 8 experts, top-2. The fields that make
a family different (dense layers, shared experts, groups, layer kinds) are written out in its own entry.
Token ids below `FIRST_TOKEN` are special (padding, image, ...), so random inputs start there.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import transformers

FIRST_TOKEN = 16
AVAILABLE = frozenset(dir(transformers))  # names of its classes: newer families are missing from older releases


@dataclass(frozen=True, slots=True)
class Family:
    """One tiny model: which transformers classes build it, and with which configuration."""

    name: str  # model_type of the family, or "<family>-<what differs>" for a variant
    model_class: str  # a class of `transformers`
    config_class: str
    config: Mapping[str, Any]  # keyword arguments of the config: 8 experts, top-2 (zaya: top-1)
    count_field: str  # dotted path of the number of experts in config.json
    auto_class: str = "AutoModelForCausalLM"  # the Auto class that reloads a saved model
    top_k: int | tuple[int, ...] = 2  # experts per token; a tuple when it differs per layer
    experts_modules: int = 2  # how many distinct experts modules the model holds
    notes: str = ""


FAMILIES: dict[str, Family] = {}
VARIANTS: dict[str, Family] = {}

# fmt: off
SPECIAL: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
ROPE: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0}
YARN: dict[str, Any] = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "beta_fast": 32.0,
    "beta_slow": 1.0, "original_max_position_embeddings": 16}
BASE: dict[str, Any] = {**SPECIAL, "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48,
    "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
HEAD_DIM: dict[str, Any] = {**BASE, "head_dim": 16}
LATENT: dict[str, Any] = {**BASE, "num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": 24,
    "qk_nope_head_dim": 16, "qk_rope_head_dim": 4, "v_head_dim": 16}  # multi-head latent attention
INDEXER: dict[str, Any] = {"index_topk": 8, "index_head_dim": 16, "index_n_heads": 2}
ROUTED: dict[str, Any] = {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
EXPERTS: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
LOCAL: dict[str, Any] = {"num_local_experts": 8, "num_experts_per_tok": 2}
GROUPS: dict[str, Any] = {"n_group": 2, "topk_group": 1, "routed_scaling_factor": 1.5}
SHARED: dict[str, Any] = {"n_shared_experts": 1}
DENSE_FIRST: dict[str, Any] = {"mlp_layer_types": ["dense", "sparse", "sparse"]}
SLIDING: dict[str, Any] = {"sliding_window": 8,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
GRANITE: dict[str, Any] = {**BASE, **LOCAL, "intermediate_size": 24, "embedding_multiplier": 2.0,
    "logits_scaling": 0.5, "residual_multiplier": 0.8, "attention_multiplier": 0.25}
LINEAR: dict[str, Any] = {"linear_conv_kernel_dim": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4}  # gated delta net
MROPE: dict[str, Any] = {"rope_parameters": {**ROPE, "mrope_section": [3, 3, 2]}}
IMAGE_IDS: dict[str, Any] = {"image_token_id": 3, "video_token_id": 4}
VISION_IDS: dict[str, Any] = {**IMAGE_IDS, "vision_start_token_id": 5, "vision_end_token_id": 6}
PATCHES: dict[str, Any] = {"patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2}
VISION: dict[str, Any] = {**PATCHES, "depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2,
    "out_hidden_size": 32}
QWEN_VISION: dict[str, Any] = {**VISION, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]}
GEMMA_VISION: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8, "patch_size": 4,
    "position_embedding_size": 16}
SAM: dict[str, Any] = {"hidden_size": 16, "output_channels": 16, "num_hidden_layers": 1,
    "num_attention_heads": 2, "image_size": 64, "patch_size": 16, "window_size": 2, "global_attn_indexes": [0],
    "mlp_dim": 16, "downsample_channels": [16, 16]}
# fmt: on


def _family(name: str, stem: str, count: str, base: dict[str, Any], /, **config: Any) -> None:
    """Register a family that transformers has; `stem` Xyz is for XyzForCausalLM and XyzConfig, unless `family` says
    otherwise."""
    fields = {"model_class": f"{stem}ForCausalLM", "config_class": f"{stem}Config"} | config.pop("family", {})
    if fields["model_class"] in AVAILABLE:
        FAMILIES[name] = Family(name=name, count_field=count, config=base | config, **fields)


def _image_text(name: str, stem: str, count: str, base: dict[str, Any], /, **config: Any) -> None:
    """Register a family whose whole model, vision tower included, is an image-text-to-text model."""
    fields = {"model_class": f"{stem}ForConditionalGeneration", "auto_class": "AutoModelForImageTextToText"}
    _family(name, stem, count, base, family=fields | config.pop("family", {}), **config)


def _variant(name: str, /, **config: Any) -> None:
    """Register `<family>-<what differs>`: that family with some config fields changed."""
    fields = config.pop("family", {})
    parent = FAMILIES[name.split("-")[0]]
    VARIANTS[name] = replace(parent, name=name, **({"config": {**parent.config, **config}} | fields))


# fmt: off
# ---- plain decoders: softmax routing, one kind of attention ----
_family("mixtral", "Mixtral", "num_local_experts", HEAD_DIM | LOCAL, intermediate_size=24,
    num_hidden_layers=2)
_family("olmoe", "Olmoe", "num_experts", BASE | EXPERTS, intermediate_size=24, num_hidden_layers=2)
_family("flex_olmo", "FlexOlmo", "num_experts", BASE | EXPERTS, intermediate_size=24, num_hidden_layers=2)
_family("phimoe", "Phimoe", "num_local_experts", BASE | LOCAL, intermediate_size=24, num_hidden_layers=2,
    lm_head_bias=True, attention_bias=True)
_family("minimax_m2", "MiniMaxM2", "num_local_experts", HEAD_DIM | LOCAL, intermediate_size=24,
    num_hidden_layers=2, rotary_dim=8)
_family("hunyuan_v1_moe", "HunYuanMoEV1", "num_experts", HEAD_DIM, num_experts=8, moe_topk=2,
    intermediate_size=24, num_hidden_layers=2, eod_token_id=2, sep_token_id=4)
_family("aria", "AriaText", "moe_num_experts", HEAD_DIM, moe_num_experts=8, moe_topk=2,
    moe_num_shared_experts=2, intermediate_size=24, num_hidden_layers=2)
_family("qwen2_moe", "Qwen2Moe", "num_experts", BASE | EXPERTS, shared_expert_intermediate_size=40,
    num_hidden_layers=2)
_family("qwen3_moe", "Qwen3Moe", "num_local_experts", HEAD_DIM | EXPERTS, norm_topk_prob=True,
    num_hidden_layers=2)
_family("granitemoe", "GraniteMoe", "num_local_experts", GRANITE, num_hidden_layers=2)
_family("granitemoeshared", "GraniteMoeShared", "num_local_experts", GRANITE, num_hidden_layers=2,
    shared_intermediate_size=40)
_family("ernie4_5_moe", "Ernie4_5_Moe", "moe_num_experts", BASE, moe_num_experts=8, moe_k=2,
    moe_intermediate_size=24, moe_num_shared_experts=2, moe_layer_start_index=1)
_family("hy_v3", "HYV3", "num_experts", HEAD_DIM | EXPERTS | DENSE_FIRST, num_shared_experts=1,
    router_scaling_factor=1.5)

# ---- sliding and full attention alternate ----
_family("gpt_oss", "GptOss", "num_local_experts", HEAD_DIM | LOCAL, intermediate_size=24,
    num_hidden_layers=2, sliding_window=8, rope_parameters=YARN | {"truncate": False})
_family("openai_privacy_filter", "OpenAIPrivacyFilter", "num_local_experts", HEAD_DIM | LOCAL,
    intermediate_size=24, num_hidden_layers=2, sliding_window=8,
    rope_parameters=YARN | {"truncate": False},
    family={"model_class": "OpenAIPrivacyFilterForTokenClassification",
        "auto_class": "AutoModelForTokenClassification"})
_family("granitemoe_swa", "GraniteMoeSWA", "num_local_experts", GRANITE | SLIDING,
    shared_intermediate_size=40, family={"experts_modules": 3})
_family("afmoe", "Afmoe", "num_experts", HEAD_DIM | EXPERTS | SLIDING, num_dense_layers=1,
    num_shared_experts=1, route_scale=1.5, mup_enabled=True)
_family("beam", "Beam", "num_experts", HEAD_DIM | EXPERTS | GROUPS | SLIDING | DENSE_FIRST)
_family("cohere2_moe", "Cohere2Moe", "num_experts", HEAD_DIM | EXPERTS | SLIDING | DENSE_FIRST,
    intermediate_size=24, num_shared_experts=1, prefix_dense_intermediate_size=48, logit_scale=1.0)
_family("exaone_moe", "ExaoneMoe", "num_experts", HEAD_DIM | EXPERTS | GROUPS | SLIDING | DENSE_FIRST,
    num_shared_experts=1)
_family("flint", "Flint", "num_experts", HEAD_DIM | EXPERTS | SLIDING, mlp_only_layers=[0],
    shared_expert_intermediate_size=40)
_family("kolibri1", "Kolibri1", "num_local_experts", HEAD_DIM | EXPERTS | SLIDING,
    shared_expert_intermediate_size=40, family={"experts_modules": 3})
_family("laguna", "Laguna", "num_experts", HEAD_DIM | EXPERTS | SLIDING | DENSE_FIRST,
    shared_expert_intermediate_size=40, moe_routed_scaling_factor=1.5,
    num_attention_heads_per_layer=[4, 2, 4])
_family("mellum", "Mellum", "num_local_experts", HEAD_DIM | EXPERTS | SLIDING | DENSE_FIRST)
_family("mimo_v2_flash", "MiMoV2Flash", "n_routed_experts",
    HEAD_DIM | ROUTED | GROUPS | SLIDING | DENSE_FIRST, v_head_dim=12,
    rope_parameters={"full_attention": {**ROPE, "partial_rotary_factor": 0.25},
        "sliding_attention": {**ROPE, "partial_rotary_factor": 0.25}})
_family("gemma4", "Gemma4", "num_experts", HEAD_DIM, enable_moe_block=True, num_experts=8, top_k_experts=2,
    moe_intermediate_size=24, sliding_window=8, vocab_size_per_layer_input=96, global_head_dim=32,
    layer_types=["sliding_attention", "sliding_attention", "full_attention"], attention_k_eq_v=True,
    num_global_key_value_heads=1, hidden_size_per_layer_input=0, final_logit_softcapping=30.0,
    family={"config_class": "Gemma4TextConfig", "experts_modules": 3})

# ---- sigmoid scores, correction bias, groups ----
_family("deepseek_v3", "DeepseekV3", "n_routed_experts", LATENT | ROUTED | GROUPS | SHARED,
    first_k_dense_replace=1, num_nextn_predict_layers=0)
_family("axk1", "AXK1", "n_routed_experts", LATENT | ROUTED | GROUPS | SHARED | DENSE_FIRST)
_family("dots1", "Dots1", "n_routed_experts", HEAD_DIM | ROUTED | GROUPS | SHARED | SLIDING,
    first_k_dense_replace=1, norm_topk_prob=True)
_family("glm4_moe", "Glm4Moe", "n_routed_experts", HEAD_DIM | ROUTED | GROUPS | SHARED,
    first_k_dense_replace=1, use_qk_norm=True, num_nextn_predict_layers=0)
_family("glm4_moe_lite", "Glm4MoeLite", "n_routed_experts", LATENT | ROUTED | GROUPS | SHARED | DENSE_FIRST)
_family("solar_open", "SolarOpen", "n_routed_experts", HEAD_DIM | ROUTED | GROUPS | SHARED,
    num_hidden_layers=2)
_family("mistral4", "Mistral4", "n_routed_experts", LATENT | ROUTED | GROUPS | SHARED,
    first_k_dense_replace=1,
    rope_parameters=YARN | {"llama_4_scaling_beta": 0.1, "mscale": 1.0, "mscale_all_dim": 1.0},
    family={"auto_class": "AutoModelForImageTextToText"})
_family("deepseek_v2", "DeepseekV2", "n_routed_experts", LATENT | ROUTED, first_k_dense_replace=1,
    n_shared_experts=2, routed_scaling_factor=1.5)

# ---- indexed (sparse) attention ----
_family("axk2", "AXK2", "n_routed_experts", LATENT | ROUTED | GROUPS | SHARED | INDEXER | DENSE_FIRST,
    gated_norm_rank=4)
_family("deepseek_v32", "DeepseekV32", "n_routed_experts", LATENT | ROUTED | GROUPS | SHARED | INDEXER,
    first_k_dense_replace=1)
_family("glm_moe_dsa", "GlmMoeDsa", "n_routed_experts", LATENT | ROUTED | GROUPS | SHARED | INDEXER,
    first_k_dense_replace=1, indexer_types=["full", "full", "shared"])
_family("hy_v4", "HYV4", "n_routed_experts", LATENT | ROUTED | GROUPS | SHARED | INDEXER | DENSE_FIRST,
    indexer_types=["full", "full", "shared"], hc_mult=2)
_family("dots3_note", "Dots3Note", "n_routed_experts",
    LATENT | ROUTED | GROUPS | SHARED | INDEXER | DENSE_FIRST, head_dim=20,
    shared_experts_intermediate_size=40, sliding_window=8, use_dsa=True,
    layer_types=["indexed_attention", "indexed_attention", "sliding_attention"], swa_num_attention_heads=2,
    swa_num_key_value_heads=2, swa_q_lora_rank=16, swa_kv_lora_rank=12, swa_head_dim=16,
    swa_qk_nope_head_dim=12, swa_v_head_dim=16, family={"config_class": "Dots3NoteTextConfig"})
_family("deepseek_v4", "DeepseekV4", "n_routed_experts", BASE | ROUTED | SHARED | INDEXER, head_dim=16,
    intermediate_size=24, num_key_value_heads=1, q_lora_rank=16, o_groups=2, o_lora_rank=16, hc_mult=2,
    hc_sinkhorn_iters=3, partial_rotary_factor=0.25, index_topk=2, sliding_window=8,
    num_nextn_predict_layers=0,
    layer_types=["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"],
    compress_rates={"compressed_sparse_attention": 2, "heavily_compressed_attention": 4},
    mlp_layer_types=["hash_moe", "moe", "moe"], family={"experts_modules": 3})
_family("minimax_m3_vl", "MiniMaxM3VL", "num_local_experts", HEAD_DIM | LOCAL | DENSE_FIRST,
    intermediate_size=24, dense_intermediate_size=48, shared_intermediate_size=40, rotary_dim=8,
    index_n_heads=2, index_head_dim=16, index_block_size=4, index_topk_blocks=2,
    layer_types=["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"],
    family={"config_class": "MiniMaxM3VLTextConfig"})

# ---- hybrids: recurrent or convolutional layers among the attention layers ----
_family("jamba", "Jamba", "num_experts", BASE, num_experts=8, num_experts_per_tok=2, intermediate_size=24,
    num_hidden_layers=4, attn_layer_period=4, attn_layer_offset=1, expert_layer_period=2,
    expert_layer_offset=1, mamba_d_state=4)
_family("granitemoehybrid", "GraniteMoeHybrid", "num_local_experts", GRANITE, num_hidden_layers=2,
    shared_intermediate_size=40, layer_types=["linear_attention", "full_attention"], mamba_n_heads=4,
    mamba_d_state=16, mamba_expand=2, mamba_chunk_size=16)
_family("nemotron_h", "NemotronH", "n_routed_experts", HEAD_DIM | ROUTED | GROUPS | SHARED,
    layers_block_type=["linear_attention", "moe", "full_attention", "mlp", "moe"],
    moe_shared_expert_intermediate_size=40, moe_latent_size=20, ssm_state_size=16, mamba_num_heads=4,
    mamba_head_dim=16, n_groups=2, chunk_size=16)
_family("qwen3_next", "Qwen3Next", "num_experts", HEAD_DIM | EXPERTS | LINEAR,
    shared_expert_intermediate_size=40, mlp_only_layers=[0],
    layer_types=["linear_attention", "linear_attention", "full_attention"])
_family("qwen3_5_moe", "Qwen3_5Moe", "num_experts", HEAD_DIM | EXPERTS | LINEAR, num_hidden_layers=2,
    head_dim=32, partial_rotary_factor=0.5, shared_expert_intermediate_size=40,
    layer_types=["linear_attention", "full_attention"],
    rope_parameters={**ROPE, "mrope_section": [3, 3, 2], "mrope_interleaved": True,
        "partial_rotary_factor": 0.5}, family={"config_class": "Qwen3_5MoeTextConfig"})
_family("qwen4_exp", "Qwen4Exp", "num_experts", HEAD_DIM | EXPERTS | LINEAR, head_dim=32,
    shared_expert_intermediate_size=40, hc_count=2, hc_lowrank=12, ple_layer_ids=[1], ngram_size=3,
    heads_per_ngram=2, ngram_vocab_size_base=64, make_ngram_vocab_size_divisible_by=8, split_ngram_parts=2,
    indexer_n_heads=2, indexer_kv_heads=1, indexer_head_dim=16, indexer_budget=8, indexer_compress_ratio=4,
    layer_types=["linear_attention", "linear_attention", "indexed_attention"],
    rope_parameters={**ROPE, "mrope_section": [3, 3, 2], "mrope_interleaved": True,
        "partial_rotary_factor": 0.5}, family={"config_class": "Qwen4ExpTextConfig", "experts_modules": 3})
_family("lara_mini", "LaraMini", "num_experts", HEAD_DIM | EXPERTS | LINEAR, num_hidden_layers=4,
    shared_expert_intermediate_size=40, sliding_window=8, tie_word_embeddings=False,
    layer_types=["linear_attention", "sliding_attention", "linear_attention", "full_attention"],
    family={"experts_modules": 4})
_family("kimi_linear", "KimiLinear", "num_experts", LATENT | EXPERTS | GROUPS | SHARED | DENSE_FIRST,
    q_lora_rank=None, layer_types=["linear_attention", "linear_attention", "full_attention"],
    linear_head_dim=16, linear_num_heads=2)
_family("bailing_hybrid", "BailingHybrid", "num_experts", LATENT | EXPERTS | GROUPS | SHARED | DENSE_FIRST,
    q_lora_rank=None, head_dim=16, layer_types=["linear_attention", "linear_attention", "full_attention"],
    num_nextn_predict_layers=0)
_family("lfm2_moe", "Lfm2Moe", "num_experts", BASE | EXPERTS, num_dense_layers=1,
    layer_types=["conv", "conv", "full_attention"])
_family("minimax", "MiniMax", "num_local_experts", HEAD_DIM | LOCAL, intermediate_size=24,
    num_hidden_layers=2, block_size=8, layer_types=["linear_attention", "full_attention"],
    full_attn_alpha_factor=1.2, linear_attn_beta_factor=0.9, mlp_alpha_factor=1.1)
_family("zaya", "Zaya", "num_experts", HEAD_DIM, num_experts=8, num_experts_per_tok=1,
    moe_intermediate_size=24, router_hidden_size=20, layer_types=["hybrid", "hybrid_sliding", "hybrid"],
    sliding_window=8,
    family={"top_k": 1, "experts_modules": 3, "notes": "from_pretrained resets balancing_biases[-1] to -1"})
_family("inkling", "Inkling", "n_routed_experts", HEAD_DIM | ROUTED | DENSE_FIRST, n_shared_experts=2,
    swa_num_attention_heads=4, swa_num_key_value_heads=2, swa_head_dim=12, sliding_window_size=8, d_rel=4,
    rel_extent=16, layer_types=["hybrid_sliding", "hybrid", "hybrid_sliding"], route_scale=2.0,
    logits_mup_width_multiplier=2.0, family={"config_class": "InklingTextConfig"})
_family("inkling2", "Inkling2", "n_routed_experts", HEAD_DIM | ROUTED, intermediate_size=24,
    unpadded_vocab_size=90, swa_num_attention_heads=4, swa_num_key_value_heads=2, swa_head_dim=16,
    sliding_window_size=8, d_rel=4, rel_extent=16,
    layer_types=["hybrid_sliding", "hybrid", "hybrid_sliding"], route_scale=2.0,
    n_layers_per_attn_res_block=2, family={"config_class": "Inkling2TextConfig", "experts_modules": 3})
_family("inkling2_loop", "Inkling2Loop", "n_routed_experts", HEAD_DIM | ROUTED, num_hidden_layers=4,
    unpadded_vocab_size=90, swa_num_attention_heads=4, swa_num_key_value_heads=2, swa_head_dim=16,
    sliding_window_size=8, d_rel=4, rel_extent=16,
    layer_types=["hybrid_sliding", "hybrid", "hybrid_sliding", "hybrid"], route_scale=2.0,
    n_layers_per_attn_res_block=1, loop_layer_index_start=1, loop_layer_index_end=3, loop_num_passes=2,
    loop_gate_rank=8, family={"config_class": "Inkling2LoopTextConfig", "experts_modules": 4})

# ---- whole image-text models ----
_image_text("qwen3_vl_moe", "Qwen3VLMoe", "text_config.num_local_experts", VISION_IDS,
    vision_config=QWEN_VISION, text_config=HEAD_DIM | EXPERTS | MROPE | {"mlp_only_layers": [0]})
_image_text("qwen3_omni_moe", "Qwen3OmniMoeThinker", "text_config.num_experts", IMAGE_IDS,
    vision_config=QWEN_VISION, text_config=HEAD_DIM | EXPERTS | MROPE, audio_token_id=7,
    audio_start_token_id=8, user_token_id=9,
    audio_config={"d_model": 16, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 16,
        "num_mel_bins": 16, "n_window": 4, "output_dim": 32, "n_window_infer": 8,
        "downsample_hidden_size": 4, "max_source_positions": 32}, family={"experts_modules": 3})
_image_text("ernie4_5_vl_moe", "Ernie4_5_VLMoe", "text_config.moe_num_experts", IMAGE_IDS,
    image_start_token_id=5, image_end_token_id=6, video_start_token_id=7, video_end_token_id=8,
    vision_config={"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "patch_size": 4,
        "spatial_merge_size": 2, "temporal_merge_size": 2},
    text_config=HEAD_DIM | MROPE | DENSE_FIRST | {"moe_num_experts": 8, "moe_k": 2,
        "moe_intermediate_size": [24, 20], "moe_num_shared_experts": 2}, family={"experts_modules": 4})
_image_text("glm4v_moe", "Glm4vMoe", "text_config.n_routed_experts", IMAGE_IDS, image_start_token_id=5,
    image_end_token_id=6, video_start_token_id=7, video_end_token_id=8,
    vision_config={**VISION, "image_size": 16},
    text_config=HEAD_DIM | ROUTED | GROUPS | SHARED | {"first_k_dense_replace": 1,
        "partial_rotary_factor": 0.5,
        "rope_parameters": {**ROPE, "mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5}})
_image_text("glm5_next", "Glm5Next", "text_config.n_routed_experts", IMAGE_IDS, image_start_token_id=5,
    image_end_token_id=6, video_start_token_id=7, video_end_token_id=8,
    vision_config={**VISION, "image_size": 16, "projection_intermediate_size": 24},
    text_config=LATENT | ROUTED | GROUPS | SHARED | INDEXER | DENSE_FIRST | {"qk_rope_head_dim": 0,
        "index_kpool": 2, "linear_head_dim": 16, "linear_num_heads": 2, "hc_mult": 2,
        "hc_sinkhorn_iters": 3, "indexer_types": ["full", "full", "full"],
        "layer_types": ["linear_attention", "indexed_attention", "linear_attention"]})
_image_text("hy_v4_vl", "HYV4VL", "text_config.n_routed_experts", IMAGE_IDS,
    vision_config={"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
        "out_hidden_size": 32, "patch_size": 4, "max_image_size": 16},
    text_config=LATENT | ROUTED | GROUPS | SHARED | INDEXER | DENSE_FIRST | {
        "indexer_types": ["full", "full", "shared"], "hc_mult": 2,
        "rope_parameters": {**ROPE, "mrope_section": [1, 1, 0]}})
_image_text("mistral_large4", "MistralLarge4", "text_config.n_routed_experts", {}, image_token_index=3,
    vision_config={"model_type": "pixtral", "hidden_size": 16, "intermediate_size": 16,
        "num_hidden_layers": 1, "num_attention_heads": 2, "patch_size": 4, "image_size": 16},
    text_config=LATENT | ROUTED | GROUPS | SHARED | INDEXER | {
        "rope_parameters": YARN | {"attention_factor": 1.0}, "first_k_dense_replace": 1,
        "no_rope_layers": [0, 1, 1], "kv_source_layers": [0, 1, 1],
        "indexer_types": ["full", "full", "shared"]})
_image_text("muse_spark", "MuseSpark", "text_config.num_local_experts", IMAGE_IDS, audio_token_id=7,
    out_hidden_size=16, projector_hidden_size=16,
    vision_config={"patch_size": 4, "pos_emb_height": 4, "pos_emb_width": 4, "num_attention_heads": 2,
        "num_hidden_layers": 1, "hidden_size": 16, "intermediate_size": 16},
    audio_config={"patch_sizes": [4, 2], "hidden_sizes": [8, 16], "depths": [1, 1], "num_hidden_layers": 2,
        "out_hidden_size": 32},
    text_config=HEAD_DIM | LOCAL | SLIDING | DENSE_FIRST | {"moe_intermediate_size": 24,
        "moe_hidden_size": 20, "output_multiplier": 0.7, "routed_scaling_factor": 1.5})
_image_text("step3p7", "Step3p7", "text_config.n_routed_experts", {}, image_token_id=3,
    vision_config={"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "mlp_ratio": 2.0,
        "image_size": 16, "patch_size": 4, "max_position_embeddings": 16},
    text_config=HEAD_DIM | ROUTED | SLIDING | DENSE_FIRST | {"share_expert_dim": 24,
        "moe_router_scaling_factor": 1.5, "swiglu_limits": [None, 0.4, None],
        "num_sliding_attention_heads": 2})
_image_text("deepseek_ocr2", "DeepseekOcr2", "text_config.n_routed_experts", {}, image_token_id=3,
    vision_config={"sam_config": SAM,
        "encoder_config": HEAD_DIM | {"num_hidden_layers": 1, "hidden_size": 16, "head_dim": 4}},
    text_config=BASE | ROUTED | SHARED | DENSE_FIRST | {"num_key_value_heads": 4})
_image_text("unlimited_ocr", "UnlimitedOcr", "text_config.n_routed_experts", {}, image_token_id=3,
    vision_config={"sam_config": SAM,
        "encoder_config": {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
            "num_attention_heads": 2, "image_size": 64, "patch_size": 16}},
    text_config=BASE | ROUTED | SHARED | DENSE_FIRST | {"num_key_value_heads": 4, "sliding_window": 8})
_image_text("diffusion_gemma", "DiffusionGemma", "text_config.num_experts", {}, canvas_length=8,
    boi_token_id=3, eoi_token_id=4, image_token_id=5,
    vision_config=GEMMA_VISION | {"model_type": "gemma4_vision"},
    text_config=HEAD_DIM | {"num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 24,
        "sliding_window": 8, "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        "global_head_dim": 32, "num_global_key_value_heads": 1},
    family={"model_class": "DiffusionGemmaForBlockDiffusion", "experts_modules": 6})

# ---- variants ----
_variant("mixtral-16experts", num_local_experts=16)
_variant("mixtral-tied", tie_word_embeddings=True, num_experts_per_tok=3, family={"top_k": 3})
_variant("olmoe-collide", hidden_size=8, num_attention_heads=2,
    family={"notes": "hidden size equals the number of experts: q_norm, k_norm and every norm are [8] too"})
_variant("qwen3_moe-collide", head_dim=8, family={"notes": "q_norm and k_norm are [8] with 8 experts"})
_variant("qwen3_moe-norm_topk_false", norm_topk_prob=False)
_variant("qwen3_moe-sparse_step", num_hidden_layers=4, decoder_sparse_step=2,
    family={"notes": "MoE in 1 and 3"})
_variant("qwen2_moe-mlp_only_layers", num_hidden_layers=3, mlp_only_layers=[1],
    family={"notes": "MoE in 0 and 2"})
_variant("gpt_oss-top4", num_experts_per_tok=4, family={"top_k": 4})
_variant("deepseek_v3-n_group1", n_group=1, topk_group=1)
_variant("deepseek_v3-n_group4", n_group=4, topk_group=2,
    family={"notes": "two experts per group already: with fewer it builds but cannot route"})
_variant("deepseek_v3-mtp", num_nextn_predict_layers=1)
_variant("deepseek_v2-group_limited", topk_method="group_limited_greedy", n_group=2, topk_group=1)
_variant("hunyuan_v1_moe-topk_list", moe_topk=[2, 3], family={"top_k": (2, 3)})
_variant("gemma4-vl",
    family={"model_class": "Gemma4ForConditionalGeneration", "config_class": "Gemma4Config",
        "count_field": "text_config.num_experts",
        "notes": "what the hub holds; AutoModelForCausalLM loads it whole",
        "config": {"text_config": FAMILIES["gemma4"].config, "audio_config": None, "image_token_id": 3,
            "video_token_id": 4, "audio_token_id": 5, "boi_token_id": 6, "eoi_token_id": 7,
            "boa_token_id": 8, "eoa_token_index": 9, "vision_config": GEMMA_VISION}})
_variant("qwen3_5_moe-vl",
    family={"model_class": "Qwen3_5MoeForConditionalGeneration", "config_class": "Qwen3_5MoeConfig",
        "auto_class": "AutoModelForImageTextToText", "count_field": "text_config.num_experts",
        "notes": "what the hub holds",
        "config": VISION_IDS | {"text_config": FAMILIES["qwen3_5_moe"].config,
            "vision_config": VISION | {"num_position_embeddings": 16}}})
