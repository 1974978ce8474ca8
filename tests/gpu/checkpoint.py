"""A checkpoint of random weights in a known shape, in Hugging Face's layout: `checkpoint.py FOLDER SHAPE`.

Weights are bf16, normal with a deviation of 0.02, norms near 1. They are slices of one random buffer, so 16 GB take as long as their copy.
Tokens that the demo model's tokenizer does not know, and those that end an answer, have rows of an eighth of the size in the last product:
greedy answers consist of known tokens and run to their limit. Needs numpy.
"""

import json
import shutil
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy

TINY = {"layers": 2, "hidden": 128, "heads": 4, "kv_heads": 2, "head_dim": 32, "mlp": 192, "vocab": 5000}
SHAPES = {
    "tiny-qwen3": TINY,
    "tiny-llama3": TINY,
    "qwen3-0.6b": {
        "layers": 28,
        "hidden": 1024,
        "heads": 16,
        "kv_heads": 8,
        "head_dim": 128,
        "mlp": 3072,
        "vocab": 151936,
    },
    "llama3-8b": {
        "layers": 32,
        "hidden": 4096,
        "heads": 32,
        "kv_heads": 8,
        "head_dim": 128,
        "mlp": 14336,
        "vocab": 128256,
    },
}
QWEN = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "tie_word_embeddings": True, "rope_theta": 1e6}
QWEN |= {"rms_norm_eps": 1e-6, "max_position_embeddings": 40960}
# Llama 3 has 8192 positions; here are more, so that a prompt of 8192 tokens leaves room for an answer.
LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "tie_word_embeddings": False, "rope_theta": 5e5}
LLAMA |= {"rms_norm_eps": 1e-5, "max_position_embeddings": 16384}
# Values of the random buffer: 32 MiB.
BUFFER = 1 << 24
SHARD_BYTES = 2 << 30
# Tokens of the demo model's vocabulary that are text; its special tokens follow.
TEXT_TOKENS = 4087


def bf16(values):
    bits = values.astype(numpy.float32).view(numpy.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(numpy.uint16)


def tensors(shape, is_qwen):
    """Name and dimensions of each tensor."""
    hidden, mlp, dim = shape["hidden"], shape["mlp"], shape["head_dim"]
    queries, keys = shape["heads"] * dim, shape["kv_heads"] * dim
    yield "model.embed_tokens.weight", (shape["vocab"], hidden)
    for layer in range(shape["layers"]):
        at = f"model.layers.{layer}."
        yield at + "input_layernorm.weight", (hidden,)
        yield at + "self_attn.q_proj.weight", (queries, hidden)
        yield at + "self_attn.k_proj.weight", (keys, hidden)
        yield at + "self_attn.v_proj.weight", (keys, hidden)
        yield at + "self_attn.o_proj.weight", (hidden, queries)
        if is_qwen:
            yield at + "self_attn.q_norm.weight", (dim,)
            yield at + "self_attn.k_norm.weight", (dim,)
        yield at + "post_attention_layernorm.weight", (hidden,)
        yield at + "mlp.gate_proj.weight", (mlp, hidden)
        yield at + "mlp.up_proj.weight", (mlp, hidden)
        yield at + "mlp.down_proj.weight", (hidden, mlp)
    yield "model.norm.weight", (hidden,)
    if not is_qwen:
        yield "lm_head.weight", (shape["vocab"], hidden)


def sharded(all_tensors):
    """Tensors in groups of about SHARD_BYTES."""
    shards, size = [[]], 0
    for name, dims in all_tensors:
        count = int(numpy.prod(dims))
        if shards[-1] and size + 2 * count > SHARD_BYTES:
            shards.append([])
            size = 0
        shards[-1].append((name, dims, count))
        size += 2 * count
    return shards


class Buffers:
    """Random values to take slices of."""

    def __init__(self, count):
        normal = numpy.random.default_rng(1).standard_normal(count, dtype=numpy.float32)
        normal *= 0.02
        self.weights, self.small = bf16(normal), bf16(normal / 8)
        self.norms = bf16(1 + 5 * normal[: 1 << 16])

    def pieces(self, name, dims, count, places):
        """Slices that make up the tensor."""
        if len(dims) == 1:
            yield self.norms[:count]
            return
        is_vocabulary = name in ("model.embed_tokens.weight", "lm_head.weight")
        text = min(TEXT_TOKENS * dims[1], count) if is_vocabulary else count
        for source, wanted in ((self.weights, text), (self.small, count - text)):
            left = wanted
            while left > 0:
                start = int(places.integers(0, max(len(source) // 2, 1)))
                piece = source[start : start + left]
                left -= len(piece)
                yield piece


def write_shard(path, shard, buffers, number):
    header, at = {"__metadata__": {"format": "pt"}}, 0
    for name, dims, count in shard:
        header[name] = {"dtype": "BF16", "shape": list(dims), "data_offsets": [at, at + 2 * count]}
        at += 2 * count
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 64 + 56)  # with the 8 bytes of the length, values begin at a multiple of 64
    places = numpy.random.default_rng([2, number])
    with open(path, "wb", buffering=0) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, dims, count in shard:
            for piece in buffers.pieces(name, dims, count, places):
                view = memoryview(piece).cast("B")
                while len(view) > 0:
                    view = view[file.write(view) :]
    wanted = 8 + len(text) + at
    assert path.stat().st_size == wanted, f"{path}: {path.stat().st_size} bytes, not {wanted}: is there room?"
    return at


def tokenizer_folder():
    here = Path(__file__).resolve().parent
    for folder in (here / "demo", here.parent.parent / "models" / "penstock-demo"):
        if (folder / "tokenizer.json").exists():
            return folder
    raise FileNotFoundError("demo/tokenizer.json beside this script, or models/penstock-demo")


def main():
    folder, kind = Path(sys.argv[1]), sys.argv[2]
    began, shape, is_qwen = time.monotonic(), SHAPES[kind], "llama" not in kind
    folder.mkdir(parents=True, exist_ok=True)
    config = dict(QWEN if is_qwen else LLAMA)
    config |= {"vocab_size": shape["vocab"], "hidden_size": shape["hidden"], "intermediate_size": shape["mlp"]}
    config |= {
        "num_hidden_layers": shape["layers"],
        "num_attention_heads": shape["heads"],
        "head_dim": shape["head_dim"],
    }
    config |= {
        "num_key_value_heads": shape["kv_heads"],
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
    }
    config |= {"bos_token_id": None, "eos_token_id": 4089, "pad_token_id": 4087, "torch_dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [4089, 4087], "do_sample": False}))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(tokenizer_folder() / name, folder / name)
    shards = sharded(tensors(shape, is_qwen))
    largest = max(count for shard in shards for _, _, count in shard)
    buffers = Buffers(max(min(BUFFER, largest), 1 << 16))
    names = [f"model-{number + 1:05}-of-{len(shards):05}.safetensors" for number in range(len(shards))]
    with ThreadPoolExecutor(16) as pool:
        jobs = [
            pool.submit(write_shard, folder / name, shard, buffers, number)
            for number, (name, shard) in enumerate(zip(names, shards, strict=True))
        ]
        total = sum(job.result() for job in jobs)
    index = {tensor: name for name, shard in zip(names, shards, strict=True) for tensor, _, _ in shard}
    whole = {"metadata": {"total_size": total}, "weight_map": index}
    (folder / "model.safetensors.index.json").write_text(json.dumps(whole))
    print(f"{kind}: {total / 1e9:.2f} GB in {len(shards)} files, {time.monotonic() - began:.1f} s")


if __name__ == "__main__":
    main()
