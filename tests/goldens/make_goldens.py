#!/usr/bin/env python3
"""Reference logprobs of small random models of every family, from Hugging Face transformers.

    python make_goldens.py [--only NAME] [--out tests/goldens/models]

One file per case. It holds the config, the list of tensors as transformers has them, a seed from which both sides derive the
same weights bit for bit (`weights` below; in Rust: backends/engine/tests/all/common/weights.rs), the tokens, and transformers'
logprobs in float32 with eager attention. Beside them: how far transformers' own bfloat16 run is from its float32 run over
the same values, which is the yardstick for our bfloat16 paths.
"""

import argparse
import copy
import json
import os
import tempfile

import numpy as np
import peft
import torch
import transformers
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

GREEDY, TOP, STRIDED, POSITIONS = 24, 8, 8, 160


def base(name, kind, **kw):
    out = dict(
        architectures=[name],
        model_type=kind,
        vocab_size=203,
        hidden_size=96,
        intermediate_size=141,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=2,
        rms_norm_eps=1e-5,
        max_position_embeddings=1024,
        hidden_act="silu",
        rope_theta=10000.0,
        tie_word_embeddings=False,
        attention_dropout=0.0,
    )
    out.update(kw)
    return {k: v for k, v in out.items() if v is not ...}


def llama(**kw):
    return base("LlamaForCausalLM", "llama", **kw)


def mistral(**kw):
    return base("MistralForCausalLM", "mistral", **kw)


def qwen2(**kw):
    return base(
        "Qwen2ForCausalLM",
        "qwen2",
        **{"use_sliding_window": False, "sliding_window": None, "max_window_layers": 3, **kw},
    )


def qwen3(**kw):
    return base(
        "Qwen3ForCausalLM",
        "qwen3",
        **{"use_sliding_window": False, "sliding_window": None, "max_window_layers": 3, **kw},
    )


def qwen3_moe(**kw):
    own = dict(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=47, norm_topk_prob=True)
    more = {"use_sliding_window": False, "sliding_window": None, "mlp_only_layers": [], "decoder_sparse_step": 1}
    return base("Qwen3MoeForCausalLM", "qwen3_moe", **{**own, **more, "head_dim": 32, **kw})


def qwen2_moe(**kw):
    own = dict(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=47, shared_expert_intermediate_size=70)
    more = dict(use_sliding_window=False, mlp_only_layers=[], decoder_sparse_step=1, norm_topk_prob=False)
    return base("Qwen2MoeForCausalLM", "qwen2_moe", **{**own, **more, **kw})


def mixtral(**kw):
    own = dict(num_local_experts=5, num_experts_per_tok=2, sliding_window=None)
    return base("MixtralForCausalLM", "mixtral", **{**own, **kw})


LATENTS = dict(
    num_key_value_heads=6,
    q_lora_rank=None,
    kv_lora_rank=44,
    qk_nope_head_dim=20,
    qk_rope_head_dim=12,
    v_head_dim=22,
    moe_intermediate_size=47,
    n_routed_experts=8,
    n_shared_experts=2,
    num_experts_per_tok=2,
    first_k_dense_replace=1,
)


def deepseek2(**kw):
    own = dict(routed_scaling_factor=1.0, topk_method="greedy", norm_topk_prob=False)
    return base("DeepseekV2ForCausalLM", "deepseek_v2", **{**LATENTS, **own, **kw})


def deepseek3(**kw):
    own = dict(
        q_lora_rank=40,
        n_routed_experts=12,
        n_group=4,
        topk_group=2,
        n_shared_experts=1,
        num_experts_per_tok=3,
        routed_scaling_factor=2.5,
        norm_topk_prob=True,
        scoring_func="sigmoid",
        topk_method="noaux_tc",
    )
    return base("DeepseekV3ForCausalLM", "deepseek_v3", **{**LATENTS, **own, **kw})


def gpt_oss(**kw):
    own = dict(
        vocab_size=203,
        head_dim=32,
        num_local_experts=7,
        num_experts_per_tok=3,
        attention_bias=True,
        sliding_window=24,
        swiglu_limit=1.25,
        rope_theta=150000.0,
        rope_scaling=dict(
            rope_type="yarn",
            factor=8.0,
            beta_fast=32.0,
            beta_slow=1.0,
            truncate=False,
            original_max_position_embeddings=128,
        ),
    )
    return base("GptOssForCausalLM", "gpt_oss", **{**own, **kw})


def gemma2(**kw):
    own = dict(
        hidden_act=...,
        hidden_activation="gelu_pytorch_tanh",
        tie_word_embeddings=True,
        head_dim=24,
        query_pre_attn_scalar=20,
        sliding_window=24,
        attn_logit_softcapping=4.0,
        final_logit_softcapping=20.0,
    )
    return base("Gemma2ForCausalLM", "gemma2", **{**own, **kw})


def gemma3(**kw):
    own = dict(
        hidden_act=...,
        hidden_activation="gelu_pytorch_tanh",
        tie_word_embeddings=True,
        head_dim=24,
        num_hidden_layers=4,
        query_pre_attn_scalar=20,
        sliding_window=24,
        sliding_window_pattern=3,
        rope_theta=100000.0,
        rope_local_base_freq=1000.0,
    )
    return base("Gemma3ForCausalLM", "gemma3_text", **{**own, **kw})


def phi3(**kw):
    own = dict(hidden_size=144, original_max_position_embeddings=1024, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    return base("Phi3ForCausalLM", "phi3", **{**own, **kw})


def olmo2(**kw):
    return base("Olmo2ForCausalLM", "olmo2", **{"pad_token_id": 0, "eos_token_id": 1, **kw})


def olmo3(**kw):
    own = dict(num_hidden_layers=4, sliding_window=24, pad_token_id=0, eos_token_id=1)
    return base("Olmo3ForCausalLM", "olmo3", **{**own, **kw})


def olmoe(**kw):
    own = dict(num_experts=8, num_experts_per_tok=2, intermediate_size=47, pad_token_id=0, eos_token_id=1)
    return base("OlmoeForCausalLM", "olmoe", **{**own, **kw})


def gemma(**kw):
    own = dict(hidden_act="gelu_pytorch_tanh", head_dim=24)
    return base("GemmaForCausalLM", "gemma", **{**own, **kw})


def ministral(**kw):
    return base("MinistralForCausalLM", "ministral", **{"head_dim": 24, **kw})


def seed_oss(**kw):
    own = dict(pad_token_id=0, bos_token_id=1, eos_token_id=2)
    return base("SeedOssForCausalLM", "seed_oss", **{**own, **kw})


def exaone4(**kw):
    return base("Exaone4ForCausalLM", "exaone4", **{"head_dim": 20, **kw})


def ernie(**kw):
    own = dict(pad_token_id=0, bos_token_id=1, eos_token_id=2)
    return base("Ernie4_5ForCausalLM", "ernie4_5", **{**own, **kw})


FACTORS = dict(embedding_multiplier=5.3, attention_multiplier=0.2, residual_multiplier=0.55, logits_scaling=1.5)


def granite(**kw):
    own = dict(pad_token_id=0, bos_token_id=1, eos_token_id=2)
    return base("GraniteForCausalLM", "granite", **{**FACTORS, **own, **kw})


def granite4(**kw):
    own = dict(
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        intermediate_size=77,
        shared_intermediate_size=141,
        num_local_experts=0,
        num_experts_per_tok=0,
        layer_types=["attention"] * 3,
        position_embedding_type="rope",
        mamba_n_heads=12,
        mamba_d_head=16,
    )
    return base("GraniteMoeHybridForCausalLM", "granitemoehybrid", **{**FACTORS, **own, **kw})


def glm(**kw):
    own = dict(head_dim=24, partial_rotary_factor=0.5, pad_token_id=0, eos_token_id=1)
    return base("GlmForCausalLM", "glm", **{**own, **kw})


def glm4(**kw):
    return {**glm(**kw), "architectures": ["Glm4ForCausalLM"], "model_type": "glm4"}


def smollm3(**kw):
    own = dict(pad_token_id=0, bos_token_id=1, eos_token_id=2)
    return base("SmolLM3ForCausalLM", "smollm3", **{**own, **kw})


LLAMA3 = dict(
    rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64
)
LONGROPE = dict(
    type="longrope",
    short_factor=[1.0 + i / 20 for i in range(12)],
    long_factor=[1.0 + i * i / 9 for i in range(12)],
)

# name: (config, dtype, shards, tokens, options).  Odd on purpose: head_dim unlike hidden/heads, three queries per KV head, vocabularies
# and MLP widths that no tile divides.
CASES = {
    "llama-plain": (llama(), "bf16", 1, 120, {}),
    "llama-llama3-bias": (
        llama(head_dim=20, attention_bias=True, rope_theta=500000.0, rope_scaling=LLAMA3),
        "f32",
        1,
        140,
        {},
    ),
    "llama-mlp-bias": (llama(attention_bias=True, mlp_bias=True), "bf16", 1, 120, {}),
    "llama-linear-tied": (
        llama(
            tie_word_embeddings=True,
            num_attention_heads=4,
            num_key_value_heads=4,
            rope_scaling=dict(type="linear", factor=2.5),
        ),
        "f16",
        3,
        110,
        {},
    ),
    "llama-dynamic": (
        llama(
            max_position_embeddings=64,
            rope_theta=...,
            rope_parameters=dict(rope_type="dynamic", factor=2.0, rope_theta=20000.0),
        ),
        "bf16",
        1,
        128,
        dict(context=128),
    ),
    "llama-long": (
        llama(
            vocab_size=97,
            hidden_size=66,
            head_dim=32,
            num_attention_heads=3,
            num_key_value_heads=1,
            intermediate_size=99,
            num_hidden_layers=2,
        ),
        "bf16",
        1,
        700,
        {},
    ),
    "mistral-window": (mistral(sliding_window=24, head_dim=24), "bf16", 1, 150, {}),
    "mistral-long-window": (
        mistral(sliding_window=300, head_dim=32, vocab_size=131, num_hidden_layers=2),
        "f16",
        1,
        640,
        {},
    ),
    "mistral-yarn": (
        mistral(
            sliding_window=None,
            rope_theta=...,
            max_position_embeddings=256,
            rope_parameters=dict(rope_type="yarn", factor=4.0, rope_theta=10000.0, original_max_position_embeddings=64),
        ),
        "f32",
        2,
        200,
        {},
    ),
    "qwen2-tied": (qwen2(tie_word_embeddings=True, vocab_size=331), "bf16", 1, 120, {}),
    "qwen2-upper-windows": (
        qwen2(
            use_sliding_window=True,
            sliding_window=40,
            max_window_layers=1,
            hidden_size=112,
            num_attention_heads=7,
            num_key_value_heads=1,
            rope_scaling=dict(
                type="yarn",
                factor=2.0,
                original_max_position_embeddings=512,
                beta_fast=16,
                beta_slow=2,
                truncate=False,
                attention_factor=1.25,
            ),
        ),
        "f16",
        2,
        130,
        {},
    ),
    "qwen3-tied": (
        qwen3(tie_word_embeddings=True, head_dim=32, rope_theta=1000000.0, rms_norm_eps=1e-6),
        "bf16",
        1,
        130,
        {},
    ),
    "qwen3-mixed-windows": (
        qwen3(
            head_dim=40,
            attention_bias=True,
            vocab_size=257,
            intermediate_size=183,
            num_attention_heads=8,
            num_key_value_heads=2,
            use_sliding_window=True,
            sliding_window=33,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        ),
        "f32",
        4,
        150,
        {},
    ),
    "qwen3-yarn-mscale": (
        qwen3(
            head_dim=64,
            num_attention_heads=3,
            num_key_value_heads=3,
            max_position_embeddings=160,
            rope_scaling=dict(
                rope_type="yarn", factor=4.0, original_max_position_embeddings=40, mscale=1.0, mscale_all_dim=0.5
            ),
        ),
        "bf16",
        1,
        160,
        {},
    ),
    "qwen3moe-plain": (qwen3_moe(), "bf16", 1, 120, {}),
    "qwen3moe-shares": (
        qwen3_moe(num_experts=20, num_experts_per_tok=6, norm_topk_prob=False, moe_intermediate_size=33),
        "f32",
        3,
        130,
        {},
    ),
    "qwen3moe-some-dense": (
        qwen3_moe(
            num_hidden_layers=4,
            decoder_sparse_step=2,
            mlp_only_layers=[3],
            attention_bias=True,
            tie_word_embeddings=True,
            use_sliding_window=True,
            sliding_window=29,
        ),
        "bf16",
        1,
        140,
        {},
    ),
    "mixtral-plain": (mixtral(rope_theta=...), "bf16", 2, 120, {}),
    "mixtral-window": (mixtral(sliding_window=24, head_dim=24, num_experts_per_tok=1), "f16", 1, 150, {}),
    "mixtral-long": (
        mixtral(
            vocab_size=97,
            hidden_size=66,
            head_dim=32,
            num_attention_heads=3,
            num_key_value_heads=1,
            intermediate_size=99,
            num_hidden_layers=2,
        ),
        "bf16",
        1,
        700,
        {},
    ),
    "deepseek2-plain": (deepseek2(), "bf16", 1, 120, {}),
    "deepseek2-groups": (
        deepseek2(
            q_lora_rank=40,
            n_routed_experts=12,
            num_experts_per_tok=3,
            topk_method="group_limited_greedy",
            n_group=4,
            topk_group=2,
            routed_scaling_factor=2.5,
            attention_bias=True,
            max_position_embeddings=160,
            rope_scaling=dict(
                type="yarn",
                factor=4.0,
                original_max_position_embeddings=40,
                beta_fast=32,
                beta_slow=1,
                mscale=0.707,
                mscale_all_dim=0.5,
            ),
        ),
        "f32",
        3,
        140,
        {},
    ),
    "deepseek3-plain": (deepseek3(), "bf16", 2, 120, {}),
    "deepseek3-halves": (
        deepseek3(
            q_lora_rank=None,
            rope_interleave=False,
            n_routed_experts=5,
            num_experts_per_tok=5,
            n_group=1,
            topk_group=1,
            norm_topk_prob=False,
            routed_scaling_factor=1.5,
            num_hidden_layers=2,
            max_position_embeddings=160,
            rope_scaling=dict(
                rope_type="yarn", factor=4.0, original_max_position_embeddings=40, mscale=1.0, mscale_all_dim=1.0
            ),
        ),
        "f16",
        1,
        130,
        {},
    ),
    "deepseek3-long": (
        deepseek3(
            vocab_size=97,
            hidden_size=66,
            num_attention_heads=3,
            num_key_value_heads=3,
            intermediate_size=99,
            num_hidden_layers=2,
            kv_lora_rank=64,
            qk_rope_head_dim=32,
            qk_nope_head_dim=32,
            v_head_dim=32,
            n_routed_experts=4,
            num_experts_per_tok=4,
            n_group=1,
            topk_group=1,
        ),
        "bf16",
        1,
        700,
        {},
    ),
    "gptoss-plain": (gpt_oss(intermediate_size=70), "bf16", 1, 150, {}),
    "gptoss-listed": (
        gpt_oss(
            rope_theta=...,
            rope_scaling=...,
            rope_parameters=dict(rope_type="default", rope_theta=20000.0),
            head_dim=20,
            hidden_size=88,
            intermediate_size=51,
            num_local_experts=5,
            num_experts_per_tok=5,
            swiglu_alpha=1.25,
            swiglu_limit=7.0,
            layer_types=["full_attention", "sliding_attention", "sliding_attention"],
        ),
        "f32",
        2,
        130,
        {},
    ),
    "gptoss-mxfp4": (
        gpt_oss(
            intermediate_size=64,
            num_local_experts=4,
            num_experts_per_tok=4,
            quantization_config=dict(quant_method="mxfp4"),
        ),
        "bf16",
        3,
        150,
        {},
    ),
    "gptoss-long": (
        gpt_oss(
            vocab_size=97,
            hidden_size=66,
            num_attention_heads=3,
            num_key_value_heads=1,
            intermediate_size=37,
            num_hidden_layers=2,
            sliding_window=300,
        ),
        "bf16",
        1,
        700,
        {},
    ),
    "gemma2-plain": (gemma2(tie_word_embeddings=False), "bf16", 1, 150, {}),
    "gemma2-listed": (
        gemma2(
            tie_word_embeddings=False,
            attention_bias=True,
            head_dim=40,
            num_attention_heads=4,
            num_key_value_heads=1,
            layer_types=["full_attention", "sliding_attention", "sliding_attention"],
        ),
        "f32",
        2,
        140,
        {},
    ),
    "gemma3-plain": (gemma3(rope_scaling=dict(rope_type="linear", factor=8.0)), "bf16", 1, 150, {}),
    "gemma3-parameters": (
        gemma3(
            rope_theta=...,
            rope_local_base_freq=...,
            sliding_window_pattern=...,
            head_dim=20,
            final_logit_softcapping=12.0,
            tie_word_embeddings=False,
            layer_types=["sliding_attention", "full_attention", "full_attention", "sliding_attention"],
            rope_parameters=dict(
                full_attention=dict(rope_type="linear", factor=2.0, rope_theta=50000.0),
                sliding_attention=dict(rope_type="default", rope_theta=2000.0),
            ),
        ),
        "f16",
        2,
        130,
        {},
    ),
    "gemma3-long-window": (
        gemma3(
            vocab_size=97,
            hidden_size=66,
            head_dim=32,
            num_attention_heads=3,
            num_key_value_heads=1,
            intermediate_size=99,
            num_hidden_layers=3,
            sliding_window=300,
        ),
        "bf16",
        1,
        640,
        {},
    ),
    "phi3-plain": (phi3(sliding_window=40), "bf16", 1, 120, {}),
    "phi3-partial-tied": (phi3(partial_rotary_factor=0.75, tie_word_embeddings=True), "f32", 3, 130, {}),
    "phi3-long": (
        phi3(max_position_embeddings=256, original_max_position_embeddings=64, rope_scaling=LONGROPE),
        "bf16",
        1,
        140,
        {},
    ),
    "phi3-short": (
        phi3(max_position_embeddings=256, original_max_position_embeddings=64, rope_scaling=LONGROPE),
        "bf16",
        1,
        64,
        dict(context=64),
    ),
    "olmo2-plain": (olmo2(), "bf16", 1, 130, {}),
    "olmo2-bias": (
        olmo2(attention_bias=True, head_dim=20, num_attention_heads=3, num_key_value_heads=3, rope_theta=500000.0),
        "f32",
        2,
        120,
        {},
    ),
    "olmo3-yarn": (
        olmo3(
            max_position_embeddings=256,
            rope_theta=50000.0,
            rope_scaling=dict(
                rope_type="yarn",
                factor=4.0,
                original_max_position_embeddings=64,
                beta_fast=32.0,
                beta_slow=1.0,
                attention_factor=1.2,
            ),
        ),
        "bf16",
        1,
        150,
        {},
    ),
    "olmo3-listed": (
        olmo3(
            num_hidden_layers=3,
            head_dim=20,
            attention_bias=True,
            layer_types=["full_attention", "sliding_attention", "sliding_attention"],
        ),
        "f32",
        2,
        140,
        {},
    ),
    "olmoe-plain": (olmoe(num_key_value_heads=6), "bf16", 1, 120, {}),
    "olmoe-normed": (
        olmoe(num_experts=5, num_experts_per_tok=3, norm_topk_prob=True, attention_bias=True),
        "f32",
        2,
        130,
        {},
    ),
    "gemma-plain": (gemma(), "bf16", 1, 130, {}),
    "gemma-bias": (
        gemma(attention_bias=True, head_dim=40, num_attention_heads=4, num_key_value_heads=1, rope_theta=20000.0),
        "f32",
        2,
        120,
        {},
    ),
    "ministral-listed": (
        ministral(sliding_window=24, layer_types=[f"{kind}_attention" for kind in ("sliding", "full", "sliding")]),
        "f16",
        2,
        150,
        {},
    ),
    "seedoss-plain": (seed_oss(), "bf16", 1, 120, {}),
    "seedoss-bias": (
        seed_oss(head_dim=20, attention_bias=False, attention_out_bias=True, mlp_bias=True),
        "f32",
        2,
        120,
        {},
    ),
    "exaone4-plain": (
        exaone4(sliding_window=None, layer_types=["full_attention"] * 3, rope_theta=500000.0, rope_scaling=LLAMA3),
        "bf16",
        1,
        130,
        {},
    ),
    "exaone4-windows": (
        exaone4(num_hidden_layers=4, sliding_window=24, sliding_window_pattern=3, num_key_value_heads=6),
        "f16",
        1,
        150,
        {},
    ),
    "ernie-plain": (ernie(head_dim=20, tie_word_embeddings=False), "bf16", 1, 130, {}),
    "ernie-bias": (ernie(rope_theta=..., rms_norm_eps=..., use_bias=True), "f32", 2, 120, {}),
    "granite-plain": (granite(), "bf16", 1, 130, {}),
    "granite-bias": (
        granite(
            attention_bias=True,
            mlp_bias=True,
            num_attention_heads=4,
            num_key_value_heads=4,
            embedding_multiplier=12.0,
            attention_multiplier=0.125,
            residual_multiplier=0.8,
            logits_scaling=1.3,
            rope_theta=20000.0,
        ),
        "f32",
        2,
        120,
        {},
    ),
    "granite4-rope": (granite4(), "bf16", 1, 120, {}),
    "granite4-nope": (granite4(position_embedding_type="nope", head_dim=20), "f16", 2, 130, {}),
    "glm-plain": (glm(), "bf16", 1, 130, {}),
    "glm-quarter": (
        glm(
            attention_bias=False,
            head_dim=40,
            num_attention_heads=4,
            num_key_value_heads=1,
            rms_norm_eps=...,
            rope_theta=...,
            rope_parameters=dict(rope_type="default", rope_theta=20000.0, partial_rotary_factor=0.25),
        ),
        "f32",
        2,
        120,
        {},
    ),
    "glm4-plain": (glm4(), "bf16", 1, 130, {}),
    "glm4-unbiased": (
        glm4(attention_bias=False, partial_rotary_factor=..., num_key_value_heads=3, head_dim=20),
        "f16",
        1,
        120,
        {},
    ),
    "qwen2moe-plain": (qwen2_moe(), "bf16", 1, 120, {}),
    "qwen2moe-mixed": (
        qwen2_moe(
            num_hidden_layers=4,
            num_experts=5,
            num_experts_per_tok=3,
            norm_topk_prob=True,
            qkv_bias=False,
            decoder_sparse_step=2,
            mlp_only_layers=[3],
            use_sliding_window=True,
            sliding_window=24,
            max_window_layers=3,
        ),
        "f32",
        2,
        130,
        {},
    ),
    "smollm3-plain": (smollm3(num_hidden_layers=5), "bf16", 1, 130, {}),
    "smollm3-windows": (
        smollm3(
            no_rope_layers=[0, 1, 0],
            use_sliding_window=True,
            sliding_window=24,
            attention_bias=True,
            mlp_bias=True,
            tie_word_embeddings=True,
        ),
        "f16",
        2,
        140,
        {},
    ),
}

ATTENTION, MLP = ["q_proj", "k_proj", "v_proj", "o_proj"], ["gate_proj", "up_proj", "down_proj"]

# The same with adapters of PEFT: name: (config, dtype, shards, tokens, options), the options being LoraConfig and the type of the adapter.
ADAPTERS = {
    "llama-all": (
        llama(),
        "bf16",
        1,
        120,
        dict(lora=dict(r=8, lora_alpha=16, target_modules=ATTENTION + MLP), stored="f32"),
    ),
    "qwen3-root": (
        qwen3(head_dim=20, attention_bias=True),
        "f32",
        1,
        120,
        dict(lora=dict(r=5, lora_alpha=5, use_rslora=True, target_modules=["q_proj", "v_proj"]), stored="bf16"),
    ),
    "phi3-patterns": (
        phi3(),
        "bf16",
        1,
        120,
        dict(
            lora=dict(
                r=3,
                lora_alpha=2.5,
                target_modules=["qkv_proj", "o_proj", "gate_up_proj", "down_proj"],
                rank_pattern={"down_proj": 6, "^model.layers.1.self_attn.qkv_proj": 1},
                alpha_pattern={"layers.0.mlp.gate_up_proj": 5},
                layers_to_transform=[0, 1],
            ),
            stored="f16",
        ),
    ),
    "olmo2-outputs": (
        olmo2(),
        "bf16",
        1,
        120,
        dict(
            lora=dict(r=16, lora_alpha=16, target_modules=["k_proj", "o_proj", "up_proj", "down_proj"]), stored="bf16"
        ),
    ),
}

DTYPE = dict(bf16=torch.bfloat16, f16=torch.float16, f32=torch.float32)


def uniform(seed, name, shape):
    """Values in [-1, 1) with 24 bits, from FNV-1a of seed and name, then splitmix64 of the index: the same in any language."""
    key = 0xCBF29CE484222325
    for byte in f"{seed}:{name}".encode():
        key = ((key ^ byte) * 0x100000001B3) & (2**64 - 1)
    with np.errstate(over="ignore"):
        z = np.uint64(key) + (np.arange(int(np.prod(shape)), dtype=np.uint64) + np.uint64(1)) * np.uint64(
            0x9E3779B97F4A7C15
        )
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z ^= z >> np.uint64(31)
    return ((z >> np.uint64(40)).astype(np.float32) / np.float32(2**23) - np.float32(1)).reshape(shape)


def weights(seed, name, shape):
    u = uniform(seed, name, shape)
    if "norm" in name or name.endswith(("LayerNorm.weight", "_ln.weight")):
        return np.float32(1) + np.float32(0.25) * u
    if name.endswith(("_blocks", "_scales")):  # any codes; powers of two that make weights of about 1/sqrt(96)
        return np.floor((u + np.float32(1)) * np.float32(128 if name.endswith("_blocks") else 1.5)) + np.float32(
            0 if name.endswith("_blocks") else 122
        )
    if name.endswith((".bias", "_bias")):
        return np.float32(0.25) * u
    if name.endswith(".sinks"):
        return np.float32(3) * u
    if "embed" in name or "lm_head" in name:
        return np.float32(0.5) * u
    if ".lora_B." in name:  # additions of half the size of what they are added to, at a scale of 2
        return np.float32(0.25) * u * np.sqrt(np.float32(3) / np.float32(shape[1]))
    return u * np.sqrt(np.float32(3) / np.float32(shape[1]))  # variance 1/fan_in


def parts(config, name, shape):
    """Names, shapes and rows of the tensors in a checkpoint whose values transformers holds as one parameter: experts are stacked, and
    so are gate and up of each."""
    gate, up, down = (
        ("w1", "w3", "w2") if "Mixtral" in config["architectures"][0] else ("gate_proj", "up_proj", "down_proj")
    )
    block = name.rsplit(".", 2)[0].replace("mlp", "block_sparse_moe" if gate == "w1" else "mlp")
    if name.endswith("mlp.gate.weight"):
        return [(f"{block}.gate.weight", shape, ...)]
    if "GptOss" in config["architectures"][0]:
        return [(name, shape, ...)]
    if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
        return [(name, shape, ...)]
    experts, rows, columns = shape
    if name.endswith("down_proj"):
        return [(f"{block}.experts.{e}.{down}.weight", (rows, columns), e) for e in range(experts)]
    halves = ((gate, slice(0, rows // 2)), (up, slice(rows // 2, rows)))
    return [
        (f"{block}.experts.{e}.{part}.weight", (rows // 2, columns), (e, half))
        for e in range(experts)
        for part, half in halves
    ]


def mxfp4(seed, name, shape, dtype):
    """A stacked parameter of experts from MXFP4, as transformers reads it, and its two tensors in a checkpoint."""
    experts, inputs, outputs = shape
    stored = [
        (f"{name}_blocks", (experts, outputs, inputs // 32, 16)),
        (f"{name}_scales", (experts, outputs, inputs // 32)),
    ]
    blocks, scales = (torch.from_numpy(weights(seed, *tensor).astype(np.uint8)) for tensor in stored)
    return convert_moe_packed_tensors(blocks, scales, dtype=dtype), [[name, list(shape)] for name, shape in stored]


def build(config, dtype, seed, stored):
    """The model in `dtype`, its weights rounded to `stored` first."""
    with tempfile.TemporaryDirectory() as folder:
        with open(os.path.join(folder, "config.json"), "w") as file:
            json.dump(config, file)
        loaded = AutoConfig.from_pretrained(folder)
    is_packed = hasattr(loaded, "quantization_config")
    if is_packed:
        del loaded.quantization_config
    plain = dict(attn_implementation="eager", experts_implementation="eager")
    model = AutoModelForCausalLM.from_config(loaded, dtype=dtype, **plain).eval()
    tensors = []
    with torch.no_grad():
        for parameter, value in model.named_parameters():
            if is_packed and parameter.endswith(("gate_up_proj", "down_proj")):
                read, stored_as = mxfp4(seed, parameter, tuple(value.shape), dtype)
                value.copy_(read)
                tensors += stored_as
                continue
            for name, shape, at in parts(config, parameter, tuple(value.shape)):
                value[at] = torch.from_numpy(weights(seed, name, shape)).to(DTYPE[stored]).to(dtype)
                tensors.append([name, list(shape)])
        for name, value in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                shape = tuple(value.shape)
                value.copy_(torch.from_numpy(weights(seed, name, shape)).to(DTYPE[stored]))
                tensors.append([name, list(shape)])
    table = model.get_input_embeddings()
    assert table.weight.dtype == dtype
    if hasattr(table, "embed_scale"):
        # The scale of a run in the stored type, which is what the model was trained with.
        table.embed_scale.copy_(torch.tensor(table.scalar_embed_scale).to(DTYPE[stored]))
    if loaded.model_type == "olmo3" and hasattr(model.model, "rotary_emb"):
        unscale_windows(model.model)
    return model, tensors


def unscale_windows(decoder):
    """Gives OLMo 3's layers with a window the rotations without scaling, as its paper and transformers 4 have it; transformers 5.5 scales those of all
    layers."""
    config = copy.deepcopy(decoder.config)
    config.rope_parameters = dict(rope_type="default", rope_theta=config.rope_parameters["rope_theta"])
    plain = type(decoder.rotary_emb)(config)

    def rotate(_, args, kwargs):
        return args, {**kwargs, "position_embeddings": plain(args[0], kwargs["position_ids"])}

    for layer, kind in zip(decoder.layers, config.layer_types, strict=True):
        if kind == "sliding_attention":
            layer.register_forward_pre_hook(rotate, with_kwargs=True)


def adapted(model, dtype, seed, lora, stored):
    """The model with an adapter of PEFT, whose matrices are derived from the names under which it saves them; its config and tensors."""
    model = get_peft_model(model, LoraConfig(**lora), autocast_adapter_dtype=False).eval()
    tensors = []
    with torch.no_grad():
        for parameter, value in model.named_parameters():
            if "lora_" in parameter:
                name, shape = parameter.replace(".default", ""), tuple(value.shape)
                value.data = torch.from_numpy(weights(seed, name, shape)).to(DTYPE[stored]).to(dtype)
                tensors.append([name, list(shape)])
    assert sorted(name for name, _ in tensors) == sorted(get_peft_model_state_dict(model))
    settings = {k: sorted(v) if isinstance(v, set) else v for k, v in model.peft_config["default"].to_dict().items()}
    return model, dict(peft=peft.__version__, adapter_config=settings, adapter_dtype=stored, adapter_tensors=tensors)


def is_router(name):
    return name.endswith((".mlp.gate", ".block_sparse_moe.gate", ".mlp.router"))


@torch.no_grad()
def routes(model, tokens):
    """Experts that each token chooses, sorted, in each layer that has experts: [layers][tokens][chosen]."""
    seen = []
    hooks = [
        module.register_forward_hook(lambda _, inputs, out: seen.append(out[2].sort(-1).values.tolist()))
        for name, module in model.named_modules()
        if is_router(name)
    ]
    model(torch.tensor([tokens]), use_cache=False)
    for hook in hooks:
        hook.remove()
    return seen


@torch.no_grad()
def logprobs(model, tokens):
    return model(torch.tensor([tokens]), use_cache=False).logits[0].float().log_softmax(-1)


def make(name, config, stored, shards, length, options):
    vocab, context = config["vocab_size"], options.get("context")
    greedy = 0 if context else GREEDY  # with dynamic scaling every length has other rotations
    adapter = {}
    for seed in range(1, 50):
        model, tensors = build(config, torch.float32, seed, stored)
        if "lora" in options:
            model, adapter = adapted(model, torch.float32, seed, **options)
        tokens = [int(t) for t in (uniform(seed, "tokens", (length,)) + 1) / 2 * vocab][: length - greedy]
        for _ in range(greedy):
            tokens.append(int(logprobs(model, tokens)[-1].argmax()))
        full = logprobs(model, tokens)
        best = full.topk(2).values
        margin = (best[:, 0] - best[:, 1]).min().item()
        repeats = max(tokens[-greedy:].count(t) for t in tokens[-greedy:]) if greedy else 0
        # A seed whose choices are clear at every position, so that equal tokens is a fair demand, and that does not fall into a loop of one token.
        if margin > 5e-3 / (length / 100) and repeats < 12:
            break
    positions = sorted(set(np.linspace(0, length - 1, min(POSITIONS, length)).astype(int).tolist()))
    rounded = build(config, torch.bfloat16, seed, stored)[0]
    if "lora" in options:
        rounded, _ = adapted(rounded, torch.bfloat16, seed, **options)
    half = logprobs(rounded, tokens)
    chosen_by, theirs = routes(model, tokens), routes(rounded, tokens)
    # A token whose experts change has other logits, whatever the precision; the yardstick is over the others.
    alike = [all(a[p] == b[p] for a, b in zip(chosen_by, theirs, strict=True)) for p in range(length)]
    rows, values, errors = [], [], []
    for p in positions:
        ids = full[p].topk(TOP).indices.tolist()
        chosen = ids + [(p * 7 + j * vocab // STRIDED) % vocab for j in range(STRIDED)]
        rows.append(ids)
        values.append([round(v, 5) for v in full[p][chosen].tolist()])
        if alike[p]:
            errors.append((half[p][chosen] - full[p][chosen]).abs())
    errors = torch.stack(errors)
    print(
        f"{name:22s} seed {seed:2d} margin {margin:.4f} logprob std {full.std():.2f} bf16 mean {errors.mean():.4f} max {errors.max():.4f} greedy {tokens[length - greedy :]}"
    )
    mixture = dict(routes=chosen_by, routes_alike=round(sum(alike) / length, 4)) if chosen_by else {}
    if mixture:
        print(f"{'':22s} {sum(alike)} of {length} tokens have the same experts in bf16")
    return dict(
        case=name,
        transformers=transformers.__version__,
        torch=torch.__version__,
        config=config,
        seed=seed,
        dtype=stored,
        shards=shards,
        context=context,
        tensors=tensors,
        tokens=tokens,
        prompt=length - greedy,
        argmax=full.argmax(-1).tolist(),
        positions=positions,
        top=rows,
        logprobs=values,
        bf16=dict(mean=round(errors.mean().item(), 6), max=round(errors.max().item(), 6)),
        **mixture,
        **adapter,
    )


# Cases whose models are also asked for vectors, and the lengths of the texts: tokens of the case's own sequence.
VECTORS = ("qwen3-tied", "qwen3-mixed-windows", "llama-llama3-bias", "mistral-window", "gemma3-plain")
LENGTHS = (1, 7, 32, 33, 100)


@torch.no_grad()
def states(model, tokens):
    """State of the last token behind the last norm: what an embedding model pools by its last token."""
    return model.model(torch.tensor([tokens]), use_cache=False).last_hidden_state[0, -1].float()


def vectors(folder):
    """Vectors of the last token, before they are scaled, and how far those of a bf16 run are from them, scaled to length 1."""
    scaled = torch.nn.functional.normalize
    for name in VECTORS:
        with open(os.path.join(folder, name + ".json")) as file:
            case = json.load(file)
        config, seed, stored = case["config"], case["seed"], case["dtype"]
        full, half = (build(config, dtype, seed, stored)[0] for dtype in (torch.float32, torch.bfloat16))
        rows, errors = [], []
        for length in LENGTHS:
            want, got = (states(model, case["tokens"][:length]) for model in (full, half))
            rows.append([round(v, 6) for v in want.tolist()])
            errors.append((scaled(got, dim=0) - scaled(want, dim=0)).abs())
        errors = torch.stack(errors)
        print(f"{name:22s} vectors, bf16 mean {errors.mean():.5f} max {errors.max():.5f}")
        bf16 = dict(mean=round(errors.mean().item(), 7), max=round(errors.max().item(), 7))
        yield dict(case=name, lengths=LENGTHS, states=rows, bf16=bf16)


def save(folder):
    """A folder as transformers itself writes it: sharded, with its own config.json and index; and what it computes from it."""
    config = qwen2(tie_word_embeddings=True, vocab_size=67, hidden_size=48, intermediate_size=37, num_hidden_layers=2)
    model, _ = build(config, torch.bfloat16, 1, "bf16")
    model.save_pretrained(folder, max_shard_size="20KB")
    tokens = [int(t) for t in (uniform(1, "tokens", (40,)) + 1) / 2 * 67]
    again = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    last = [round(v, 5) for v in logprobs(again, tokens)[-1].tolist()]
    with open(os.path.join(folder, "expected.json"), "w") as f:
        json.dump(dict(tokens=tokens, logprobs=last), f, separators=(",", ":"))
        f.write("\n")


def save_adapter(base, folder):
    """An adapter of the folder of `save`, as PEFT itself writes it, and what it computes with it."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, attn_implementation="eager")
    lora = dict(r=2, lora_alpha=6, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM")
    model = get_peft_model(model, LoraConfig(**lora)).eval()
    model.save_pretrained(folder)
    os.remove(os.path.join(folder, "README.md"))
    name = os.path.join(folder, "adapter_config.json")
    with open(name) as f:
        settings = json.load(f)
    # Where the base was, and lists that PEFT makes of sets in no order.
    settings.update(base_model_name_or_path="saved", target_modules=sorted(settings["target_modules"]))
    with open(name, "w") as f:
        json.dump(settings, f, indent=2, sort_keys=True)
        f.write("\n")
    tokens = [int(t) for t in (uniform(2, "tokens", (40,)) + 1) / 2 * 67]
    last = [round(v, 5) for v in logprobs(model, tokens)[-1].tolist()]
    with open(os.path.join(folder, "expected.json"), "w") as f:
        json.dump(dict(tokens=tokens, logprobs=last), f, separators=(",", ":"))
        f.write("\n")


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--out", default=os.path.join(os.path.dirname(os.path.abspath(__file__)), "models"))
    ap.add_argument("--only", default="", help="one case, 'vectors', or 'adapters'")
    a = ap.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    os.makedirs(a.out, exist_ok=True)
    for name, case in CASES.items():
        if a.only and a.only != name:
            continue
        with open(os.path.join(a.out, f"{name}.json"), "w") as f:
            json.dump(make(name, *case), f, separators=(",", ":"))
            f.write("\n")

    adapters = os.path.join(os.path.dirname(a.out), "adapters")
    for name, case in ADAPTERS.items():
        if a.only in ("", "adapters", name):
            os.makedirs(adapters, exist_ok=True)
            with open(os.path.join(adapters, f"{name}.json"), "w") as f:
                json.dump(make(name, *case), f, separators=(",", ":"))
                f.write("\n")

    if a.only in ("", "vectors"):
        with open(os.path.join(os.path.dirname(a.out), "vectors.json"), "w") as f:
            json.dump(list(vectors(a.out)), f, separators=(",", ":"))
            f.write("\n")
    if not a.only:
        save(os.path.join(os.path.dirname(a.out), "saved"))
    if a.only in ("", "adapters"):
        folder = os.path.dirname(a.out)
        save_adapter(os.path.join(folder, "saved"), os.path.join(folder, "saved-adapter"))


if __name__ == "__main__":
    main()
