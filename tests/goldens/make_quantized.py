#!/usr/bin/env python3
"""Reference logprobs of small random models whose matrices are quantized, with scales in tensors of their own.

    python make_quantized.py [--only NAME] [--check] [--out tests/goldens/models]

The files are those of make_goldens.py, with three fields more: `stored`, the types of the tensors that are not plain weights; `values`, the
integers of tensors that are not random (groups of columns, shapes); `scale`, the size of the scales. Codes and zero points are random bytes, so
every code occurs. transformers runs on the dequantized values in float32, and in bfloat16 for the yardstick; where activations are rounded to
8 bits too (w8a8), that run rounds the inputs of the quantized layers, one scale per token, as compressed-tensors does.

Layouts follow AutoGPTQ (nn_modules/qlinear/qlinear_cuda_old.py), GPTQModel (checkpoint_format gptq_v2: zero points without the addition of 1),
AutoAWQ (awq/utils/packing_utils.py), compressed-tensors (compressors/pack_quantized, naive_quantized) and DeepSeek-V3 (inference/kernel.py).
`--check` compares what is read here with what compressed-tensors and transformers' fine-grained fp8 read of the same tensors.
"""

import argparse
import json
import os
import tempfile

import make_goldens as goldens
import numpy as np
import torch
from make_goldens import DTYPE, llama, mistral, parts, phi3, qwen2, qwen3, qwen3_moe, uniform, weights
from transformers import AutoConfig, AutoModelForCausalLM

AWQ_PLACES = [0, 4, 1, 5, 2, 6, 3, 7]
TYPES = dict(bf16="BF16", f16="F16", f32="F32")


def compressed(format, weights, activations=None, ignore=("lm_head",)):
    base = dict(actorder=None, block_structure=None, dynamic=False, group_size=None, observer="minmax")
    group = dict(
        input_activations=activations, output_activations=None, targets=["Linear"], weights={**base, **weights}
    )
    return dict(
        quant_method="compressed-tensors",
        format=format,
        config_groups=dict(group_0=group),
        ignore=list(ignore),
        kv_cache_scheme=None,
        sparsity_config={},
        transform_config={},
        quantization_status="compressed",
    )


INT8_TOKENS = dict(num_bits=8, type="int", symmetric=True, dynamic=True, strategy="token", group_size=None)
GPTQ = dict(quant_method="gptq", sym=True, true_sequential=True, damp_percent=0.1, static_groups=False)
FP8 = dict(quant_method="fp8", activation_scheme="dynamic", fmt="e4m3")

# name: (config, type of the plain weights, type of the scales, size of the scales, modules that stay as they are)
CASES = {
    "llama-gptq4-order": (
        llama(
            intermediate_size=160,
            quantization_config=dict(GPTQ, bits=4, group_size=32, desc_act=True, checkpoint_format="gptq"),
        ),
        "f16",
        "f16",
        2**-6,
        (),
    ),
    "qwen2-gptq8-whole": (
        qwen2(
            intermediate_size=136,
            quantization_config=dict(
                GPTQ,
                bits=8,
                group_size=-1,
                desc_act=False,
                sym=False,
                checkpoint_format="gptq_v2",
                dynamic={"-:.*o_proj": {}},
            ),
        ),
        "bf16",
        "f16",
        2**-10,
        ("o_proj",),
    ),
    "qwen3moe-gptq4": (
        qwen3_moe(
            hidden_size=128,
            intermediate_size=192,
            moe_intermediate_size=64,
            quantization_config=dict(GPTQ, bits=4, group_size=64, desc_act=False),
        ),
        "bf16",
        "f16",
        2**-7,
        (),
    ),
    "mistral-awq4": (
        mistral(
            intermediate_size=160,
            sliding_window=24,
            quantization_config=dict(
                quant_method="awq",
                bits=4,
                group_size=32,
                zero_point=True,
                version="gemm",
                modules_to_not_convert=["down_proj"],
            ),
        ),
        "f16",
        "f16",
        2**-6,
        ("down_proj",),
    ),
    "phi3-awq4-fused": (
        phi3(
            hidden_size=128,
            num_attention_heads=4,
            intermediate_size=160,
            quantization_config=dict(quant_method="awq", bits=4, group_size=32, zero_point=True, version="gemm"),
        ),
        "bf16",
        "f16",
        2**-6,
        (),
    ),
    "qwen3-fp8-blocks": (
        qwen3(tie_word_embeddings=True, quantization_config=dict(FP8, weight_block_size=[32, 64])),
        "bf16",
        "f32",
        2**-10,
        (),
    ),
    "deepseek3-fp8-blocks": (
        goldens.deepseek3(quantization_config=dict(FP8, weight_block_size=[128, 32])),
        "bf16",
        "f32",
        2**-10,
        (),
    ),
    "llama-fp8-static": (
        llama(quantization_config=dict(quant_method="fp8", activation_scheme="static", ignored_layers=["lm_head"])),
        "bf16",
        "f32",
        2**-10,
        (),
    ),
    "mistral-fp8-rows": (
        mistral(
            sliding_window=None,
            quantization_config=compressed(
                "float-quantized",
                dict(num_bits=8, type="float", strategy="channel", symmetric=True),
                dict(type="float"),
            ),
        ),
        "bf16",
        "bf16",
        2**-10,
        (),
    ),
    "llama-packed4": (
        llama(
            intermediate_size=160,
            quantization_config=compressed(
                "pack-quantized", dict(num_bits=4, type="int", strategy="group", group_size=32, symmetric=True)
            ),
        ),
        "bf16",
        "bf16",
        3 / 128,
        (),
    ),
    "qwen2-packed4-order": (
        qwen2(
            intermediate_size=160,
            quantization_config=compressed(
                "pack-quantized",
                dict(num_bits=4, type="int", strategy="group", group_size=32, symmetric=False, actorder="group"),
            ),
        ),
        "bf16",
        "bf16",
        2**-6,
        (),
    ),
    "qwen3-packed8-rows": (
        qwen3(
            quantization_config=compressed(
                "pack-quantized",
                dict(num_bits=8, type="int", strategy="channel", symmetric=False),
                ignore=["lm_head", "v_proj"],
            )
        ),
        "bf16",
        "f16",
        2**-10,
        ("v_proj",),
    ),
    "llama-w8a8": (
        llama(
            attention_bias=True,
            quantization_config=compressed(
                "int-quantized", dict(num_bits=8, type="int", strategy="channel", symmetric=True), INT8_TOKENS
            ),
        ),
        "bf16",
        "bf16",
        3 / 2048,
        (),
    ),
}


class Store:
    """Tensors of a checkpoint as they are stored, under their names."""

    def __init__(self, seed, scale):
        self.seed, self.scale = seed, scale
        self.tensors, self.stored, self.values = [], {}, {}

    def add(self, name, shape, dtype):
        self.tensors.append([name, list(shape)])
        self.stored[name] = dtype

    def bytes(self, name, shape, dtype, size):
        self.add(name, shape, dtype)
        u = uniform(self.seed, name, (int(np.prod(shape)) * size,))
        return np.floor((u + np.float32(1)) * np.float32(128)).astype(np.uint8)

    def words(self, name, shape):
        return self.bytes(name, shape, "I32", 4).view("<u4").reshape(shape)

    def float8(self, name, shape):
        codes = self.bytes(name, shape, "F8_E4M3", 1)
        codes = np.where(codes & 0x7F == 0x7F, codes ^ 1, codes)  # no NaN
        return torch.from_numpy(codes).view(torch.float8_e4m3fn).float().numpy().reshape(shape)

    def integers(self, name, values, dtype):
        values = np.asarray(values)
        self.add(name, values.shape, dtype)
        self.values[name] = values.tolist()
        return values

    def scales(self, name, shape, dtype):
        self.add(name, shape, TYPES[dtype])
        u = uniform(self.seed, name, shape)
        sizes = np.float32(self.scale) * (np.float32(1) + np.float32(0.5) * u)
        return torch.from_numpy(np.asarray(sizes, dtype=np.float32)).to(DTYPE[dtype]).float().numpy()

    def order(self, name, columns, size):
        """Groups of columns in the order in which an act-order quantizer takes them."""
        groups = np.empty(columns, dtype=np.int64)
        groups[np.argsort(uniform(self.seed, name, (columns,)), kind="stable")] = np.arange(columns) // size
        return self.integers(name, groups, "I32")


def unpack(words, bits, axis):
    """Codes of words, lowest bits first, side by side along an axis."""
    codes = np.stack([words >> np.uint32(bits * i) & np.uint32(2**bits - 1) for i in range(32 // bits)], axis + 1)
    shape = list(words.shape)
    shape[axis] *= 32 // bits
    return codes.reshape(shape).astype(np.int64)


def awq_codes(words):
    """Codes of words that hold eight columns in AWQ's order."""
    nibbles = np.stack([words >> np.uint32(4 * place) & np.uint32(15) for place in AWQ_PLACES], 2)
    return nibbles.reshape(words.shape[0], -1).astype(np.int64)


def quantized(store, config, module, shape, dtype):
    """The tensors of a matrix `[rows, columns]`, and its dequantized values in float32."""
    (rows, columns), q = shape, config["quantization_config"]

    def named(kind):
        return f"{module}.{kind}"

    if q["quant_method"] == "gptq":
        size = columns if q["group_size"] == -1 else q["group_size"]
        per = 32 // q["bits"]
        codes = unpack(store.words(named("qweight"), (columns // per, rows)), q["bits"], 0)
        zeros = unpack(store.words(named("qzeros"), (columns // size, rows // per)), q["bits"], 1)
        if q.get("checkpoint_format") != "gptq_v2":
            zeros = (zeros + 1) % 2 ** q["bits"]
        scales = store.scales(named("scales"), (columns // size, rows), dtype)
        if q["desc_act"]:
            group = store.order(named("g_idx"), columns, size)
        else:
            group = store.integers(named("g_idx"), np.arange(columns) // size, "I32")
        return ((codes - zeros[group]).astype(np.float32) * scales[group]).T
    if q["quant_method"] == "awq":
        size = q["group_size"]
        codes = awq_codes(store.words(named("qweight"), (columns, rows // 8)))
        zeros = awq_codes(store.words(named("qzeros"), (columns // size, rows // 8)))
        scales = store.scales(named("scales"), (columns // size, rows), dtype)
        group = np.arange(columns) // size
        return ((codes - zeros[group]).astype(np.float32) * scales[group]).T
    if q["quant_method"] == "fp8":
        values = store.float8(named("weight"), shape)
        if "weight_block_size" not in q:
            store.scales(named("input_scale"), (1,), "f32")
            return values * store.scales(named("weight_scale"), (), dtype)
        high, wide = q["weight_block_size"]
        scales = store.scales(named("weight_scale_inv"), (-(-rows // high), -(-columns // wide)), dtype)
        return values * scales[np.arange(rows)[:, None] // high, np.arange(columns)[None] // wide]
    args = q["config_groups"]["group_0"]["weights"]
    if q["format"] == "float-quantized":
        return store.float8(named("weight"), shape) * store.scales(named("weight_scale"), (rows, 1), dtype)
    if q["format"] == "int-quantized":
        codes = store.bytes(named("weight"), shape, "I8", 1).view(np.int8).reshape(shape)
        return codes.astype(np.float32) * store.scales(named("weight_scale"), (rows, 1), dtype)
    bits, size = args["num_bits"], args["group_size"] or columns
    per = 32 // bits
    codes = unpack(store.words(named("weight_packed"), (rows, -(-columns // per))), bits, 1)[:, :columns]
    scales = store.scales(named("weight_scale"), (rows, columns // size), dtype)
    zeros = np.full(scales.shape, 2 ** (bits - 1))
    if not args["symmetric"]:
        zeros = unpack(store.words(named("weight_zero_point"), (-(-rows // per), columns // size)), bits, 0)[:rows]
    store.integers(named("weight_shape"), shape, "I64")
    group = np.arange(columns) // size
    if args["actorder"] == "group":
        group = store.order(named("weight_g_idx"), columns, size)
    return (codes - zeros[:, group]).astype(np.float32) * scales[:, group]


def is_quantized(name, shape, kept):
    is_matrix = (
        ".layers." in name and len(shape) == 2 and name.endswith(".weight") and not name.endswith(".gate.weight")
    )
    return is_matrix and not any(f".{module}." in name for module in kept)


def round_tokens(module, inputs):
    """Inputs of a layer rounded to 8 bits with one scale per token."""
    x = inputs[0]
    scale = (x.abs().amax(-1, keepdim=True).float() / 127.5).clamp_min(1e-30)
    return (((x.float() / scale).round().clamp(-128, 127) * scale).to(x.dtype),)


def build(case, seed):
    """Maker of the model in a type, and the tensors that it was made of."""
    config, plain, of_scales, scale, kept = CASES[case]
    store = Store(seed, scale)
    settings = {k: v for k, v in config.items() if k != "quantization_config"}

    def make(dtype):
        with tempfile.TemporaryDirectory() as folder:
            with open(os.path.join(folder, "config.json"), "w") as file:
                json.dump(settings, file)
            loaded = AutoConfig.from_pretrained(folder)
        eager = dict(attn_implementation="eager", experts_implementation="eager")
        model = AutoModelForCausalLM.from_config(loaded, dtype=dtype, **eager).eval()
        with torch.no_grad():
            for parameter, value in model.named_parameters():
                for name, shape, at in parts(config, parameter, tuple(value.shape)):
                    if is_quantized(name, shape, kept):
                        read = quantized(store, config, name.removesuffix(".weight"), shape, of_scales)
                        value[at] = torch.from_numpy(np.ascontiguousarray(read)).to(dtype)
                        continue
                    value[at] = torch.from_numpy(weights(seed, name, shape)).to(DTYPE[plain]).to(dtype)
                    store.tensors.append([name, list(shape)])
            for name, value in model.named_buffers():
                if name.endswith("e_score_correction_bias"):
                    value.copy_(torch.from_numpy(weights(seed, name, tuple(value.shape))).to(DTYPE[plain]))
                    store.tensors.append([name, list(value.shape)])
        if config["quantization_config"].get("format") == "int-quantized" and dtype != torch.float32:
            for name, module in model.named_modules():
                if isinstance(module, torch.nn.Linear) and ".layers." in name:
                    module.register_forward_pre_hook(round_tokens)
        return model

    return make, store


def golden(case):
    config, plain, _, scale, _ = CASES[case]
    latest = {}

    def of_seed(_config, dtype, seed, _stored):
        make, store = build(case, seed)
        latest["store"] = store
        return make(dtype), store.tensors

    goldens.build = of_seed
    made = goldens.make(case, config, plain, 1, 120, {})
    return dict(made, stored=latest["store"].stored, values=latest["store"].values, scale=scale)


def check():
    """Compares what is read here with what the formats' own libraries read of the same tensors."""
    import compressed_tensors.quantization as ct
    from compressed_tensors.compressors import BaseCompressor
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    for case, (config, _, of_scales, scale, _) in CASES.items():
        q, shape = config["quantization_config"], (64, 96)
        if q["quant_method"] not in ("compressed-tensors", "fp8"):
            continue
        if "weight_block_size" in q:  # transformers needs whole blocks
            q = dict(q, weight_block_size=[32, 32])
        if "config_groups" in q:  # compressed-tensors no longer has groups in the order of activations
            weights_of = dict(q["config_groups"]["group_0"]["weights"], actorder=None)
            q = dict(q, config_groups=dict(group_0=dict(weights=weights_of)))
        store = Store(1, scale)
        ours = torch.from_numpy(quantized(store, dict(quantization_config=q), "m", shape, of_scales))
        twice = Store(1, scale)
        state = {}
        for name, shape_of in store.tensors:
            kind = name.removeprefix("m.")
            match store.stored[name]:
                case "I32" | "I64" as dtype if name in store.values:
                    state[kind] = torch.tensor(store.values[name], dtype=torch.int32 if dtype == "I32" else torch.int64)
                case "I32":
                    state[kind] = torch.from_numpy(twice.words(name, shape_of).astype(np.int32))
                case "F8_E4M3":
                    state[kind] = torch.from_numpy(twice.float8(name, shape_of)).to(torch.float8_e4m3fn)
                case "I8":
                    state[kind] = torch.from_numpy(twice.bytes(name, shape_of, "I8", 1).view(np.int8).reshape(shape_of))
                case _:
                    state[kind] = torch.from_numpy(twice.scales(name, tuple(shape_of), of_scales))
        if q["quant_method"] == "fp8":
            scales = (
                state.get("weight_scale_inv", state.get("weight_scale")).reshape(-1, 96 // 32)
                if "weight_scale_inv" in state
                else state["weight_scale"].reshape(1, 1)
            )
            theirs = Fp8Dequantize(None)._dequantize_one(state["weight"], scales, torch.float32)
        else:
            scheme = ct.QuantizationScheme.model_validate(dict(targets=["Linear"], weights=weights_of))
            module = BaseCompressor.get_value_from_registry(q["format"])
            state["weight_scale"] = state["weight_scale"].float()
            theirs = module.decompress(state, scheme)["weight"].float()
        worst = (ours - theirs).abs().max().item()
        print(f"{case:22s} of the format's own library: at most {worst:.1e} away, of {ours.abs().max():.2f}")
        assert worst == 0.0, case


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--out", default=os.path.join(os.path.dirname(os.path.abspath(__file__)), "models"))
    ap.add_argument("--only", default="")
    ap.add_argument("--check", action="store_true")
    a = ap.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    if a.check:
        return check()
    for name in CASES:
        if not a.only or a.only == name:
            with open(os.path.join(a.out, f"{name}.json"), "w") as f:
                json.dump(golden(name), f, separators=(",", ":"))
                f.write("\n")


if __name__ == "__main__":
    main()
