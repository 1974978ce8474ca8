#!/usr/bin/env python3
"""Write a checkpoint of Qwen3-0.6B's shape with random bf16 weights, as a Hugging Face folder and as a GGUF.

    make_qwen3.py FOLDER          FOLDER/hf and FOLDER/bf16.gguf; needs numpy and gguf, about 2.4 GB of disk
    make_qwen3.py FOLDER --moe    FOLDER/moe: config and weights of a Qwen3-MoE of 1.04 billion weights, for engine-bench; 2.1 GB

Shapes, bytes and arithmetic are those of the real model; its words are noise. Each tensor is drawn from a generator
seeded by its name, so the files are the same bytes on every machine. The tokenizer knows bytes and Qwen's control tokens:
the benchmarks send token ids.
"""

import argparse
import hashlib
import json
import struct
from pathlib import Path

import gguf
import numpy as np

HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_DIM, INTERMEDIATE, VOCAB = 1024, 28, 16, 8, 128, 3072, 151936
CONTROL = {151643: "<|endoftext|>", 151644: "<|im_start|>", 151645: "<|im_end|>"}
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "intermediate_size": INTERMEDIATE,
    "vocab_size": VOCAB,
    "tie_word_embeddings": True,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "max_position_embeddings": 40960,
    "hidden_act": "silu",
    "attention_bias": False,
    "use_sliding_window": False,
    "sliding_window": None,
    "torch_dtype": "bfloat16",
    "eos_token_id": 151645,
    "bos_token_id": 151643,
}
# Hugging Face's name of a layer's tensor, GGUF's, and its shape.
LAYER = [
    ("input_layernorm", "attn_norm", (HIDDEN,)),
    ("self_attn.q_proj", "attn_q", (HEADS * HEAD_DIM, HIDDEN)),
    ("self_attn.k_proj", "attn_k", (KV_HEADS * HEAD_DIM, HIDDEN)),
    ("self_attn.v_proj", "attn_v", (KV_HEADS * HEAD_DIM, HIDDEN)),
    ("self_attn.q_norm", "attn_q_norm", (HEAD_DIM,)),
    ("self_attn.k_norm", "attn_k_norm", (HEAD_DIM,)),
    ("self_attn.o_proj", "attn_output", (HIDDEN, HEADS * HEAD_DIM)),
    ("post_attention_layernorm", "ffn_norm", (HIDDEN,)),
    ("mlp.gate_proj", "ffn_gate", (INTERMEDIATE, HIDDEN)),
    ("mlp.up_proj", "ffn_up", (INTERMEDIATE, HIDDEN)),
    ("mlp.down_proj", "ffn_down", (HIDDEN, INTERMEDIATE)),
]


# A mixture of 64 experts in each of 12 layers, of which a token chooses 8.
MIXTURE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_hidden_layers": 12,
    "num_key_value_heads": 4,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 384,
    "norm_topk_prob": True,
    "vocab_size": 32768,
    "tie_word_embeddings": False,
    "eos_token_id": 0,
    "bos_token_id": 0,
}


def mixture():
    """Names and shapes of the mixture's tensors, in the order of the file."""
    vocab, narrow = MIXTURE["vocab_size"], MIXTURE["num_key_value_heads"] * HEAD_DIM
    experts, width = MIXTURE["num_experts"], MIXTURE["moe_intermediate_size"]
    yield "model.embed_tokens.weight", (vocab, HIDDEN)
    for layer in range(MIXTURE["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        for name, _, shape in LAYER[:8]:
            yield f"{prefix}.{name}.weight", (narrow, HIDDEN) if name.endswith(("k_proj", "v_proj")) else shape
        yield f"{prefix}.mlp.gate.weight", (experts, HIDDEN)
        for expert in range(experts):
            parts = [("gate_proj", (width, HIDDEN)), ("up_proj", (width, HIDDEN)), ("down_proj", (HIDDEN, width))]
            for part, shape in parts:
                yield f"{prefix}.mlp.experts.{expert}.{part}.weight", shape
    yield "model.norm.weight", (HIDDEN,)
    yield "lm_head.weight", (vocab, HIDDEN)


def tensors():
    """Names of both formats and shapes, in the order of the file."""
    yield "model.embed_tokens.weight", "token_embd.weight", (VOCAB, HIDDEN)
    for layer in range(LAYERS):
        for name, short, shape in LAYER:
            yield f"model.layers.{layer}.{name}.weight", f"blk.{layer}.{short}.weight", shape
    yield "model.norm.weight", "output_norm.weight", (HIDDEN,)


def draw(name, shape):
    """Random values that keep the size of activations through every layer: [shape], bf16 bits."""
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")
    values = np.random.Generator(np.random.PCG64(seed)).standard_normal(shape, dtype=np.float32)
    if len(shape) == 1:
        values = 1 + 0.1 * values
    else:
        values *= np.float32(0.02 if "embed" in name else shape[-1] ** -0.5)
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def byte_symbols():
    """The visible character that stands for each byte in byte-level BPE."""
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    symbols, spare = {}, 256
    for byte in range(256):
        symbols[byte] = chr(byte if byte in visible else spare)
        spare += byte not in visible
    return symbols


def write_json(path, value):
    path.write_text(json.dumps(value, ensure_ascii=False, indent=1))


def write_hf(folder):
    """The Hugging Face folder."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "config.json", CONFIG)
    write_json(folder / "generation_config.json", {"eos_token_id": 151645, "do_sample": False})
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": True}
    model = {"type": "BPE", "vocab": {symbol: byte for byte, symbol in byte_symbols().items()}, "merges": []}
    tokenizer = {
        "version": "1.0",
        "added_tokens": [{"id": id, "content": text, **flags} for id, text in CONTROL.items()],
        "pre_tokenizer": level,
        "decoder": level,
        "model": model,
    }
    write_json(folder / "tokenizer.json", tokenizer)
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "chat_template": CHAT_TEMPLATE}
    write_json(folder / "tokenizer_config.json", config)
    write_safetensors(folder / "model.safetensors", [(name, shape) for name, _, shape in tensors()])


def write_mixture(folder):
    """The mixture without a tokenizer: the engine's own benchmark sends token ids."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "config.json", CONFIG | MIXTURE)
    write_safetensors(folder / "model.safetensors", list(mixture()))


def write_safetensors(path, listed):
    header, offset = {"__metadata__": {"format": "pt"}}, 0
    for name, shape in listed:
        size = 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name, shape in listed:
            draw(name, shape).tofile(file)


def write_gguf(path):
    """The same weights for llama.cpp: matrices in BF16, vectors in F32."""
    writer = gguf.GGUFWriter(str(path), "qwen3")
    writer.add_name("random-qwen3-0.6b")
    writer.add_block_count(LAYERS)
    writer.add_context_length(32768)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INTERMEDIATE)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(HEAD_DIM)
    writer.add_value_length(HEAD_DIM)
    writer.add_rope_dimension_count(HEAD_DIM)
    writer.add_layer_norm_rms_eps(CONFIG["rms_norm_eps"])
    writer.add_rope_freq_base(CONFIG["rope_theta"])
    writer.add_vocab_size(VOCAB)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    symbols = byte_symbols()
    texts = [CONTROL.get(id) or symbols.get(id) or f"[unused{id}]" for id in range(VOCAB)]
    kinds = gguf.TokenType
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(texts)
    writer.add_token_types(
        [kinds.CONTROL if id in CONTROL else kinds.NORMAL if id in symbols else kinds.UNUSED for id in range(VOCAB)]
    )
    # An empty list is left out of the file, and llama.cpp does not load a vocabulary without one.
    writer.add_token_merges([f"{symbols[0]} {symbols[1]}"])
    writer.add_eos_token_id(151645)
    for name, short, shape in tensors():
        bits = draw(name, shape)
        if len(shape) == 1:
            writer.add_tensor(short, (bits.astype(np.uint32) << 16).view(np.float32))
        else:
            writer.add_tensor(short, bits.view(np.uint8), raw_dtype=gguf.GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--moe", action="store_true")
    arguments = parser.parse_args()
    folder = arguments.folder
    if arguments.moe:
        return write_mixture(folder / "moe")
    write_hf(folder / "hf")
    write_gguf(folder / "bf16.gguf")


if __name__ == "__main__":
    main()
