"""GGUF files of the demo model, written by the standard library alone."""

import json
import struct
from array import array
from pathlib import Path

from harness import ROOT

DEMO = ROOT / "models" / "penstock-demo"
BF16, Q8_0, F32 = 30, 8, 0

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "model.layers.": "blk.",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def text(value: str) -> bytes:
    data = value.encode()
    return struct.pack("<Q", len(data)) + data


def key(name: str, value) -> bytes:
    match value:
        case bool():
            return text(name) + struct.pack("<IB", 7, value)
        case int():
            return text(name) + struct.pack("<II", 4, value)
        case float():
            return text(name) + struct.pack("<If", 6, value)
        case str():
            return text(name) + struct.pack("<I", 8) + text(value)
        case [str(), *_]:
            return text(name) + struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(text, value))
        case _:
            return text(name) + struct.pack(f"<IIQ{len(value)}i", 9, 5, len(value), *value)


def singles(bf16: bytes) -> array:
    """bf16 values as f32: their bytes are the upper halves."""
    wide = bytearray(len(bf16) * 2)
    wide[2::4], wide[3::4] = bf16[0::2], bf16[1::2]
    return array("f", bytes(wide))


def q8_0(bf16: bytes) -> bytes:
    """Blocks of 32 weights of 8 bits with a scale in half precision."""
    values, out = singles(bf16), bytearray()
    for at in range(0, len(values), 32):
        block = values[at : at + 32]
        scale = max(map(abs, block)) / 127 or 1.0
        out += struct.pack("<e", scale) + array("b", [round(v / scale) for v in block]).tobytes()
    return bytes(out)


def vocabulary(rows: int) -> dict:
    tokenizer = json.loads((DEMO / "tokenizer.json").read_text())
    config = json.loads((DEMO / "tokenizer_config.json").read_text())
    tokens, kinds = [f"[PAD{i}]" for i in range(rows)], [5] * rows
    for name, i in tokenizer["model"]["vocab"].items():
        tokens[i], kinds[i] = name, 1
    for added in tokenizer["added_tokens"]:
        tokens[added["id"]], kinds[added["id"]] = added["content"], 3 if added["special"] else 4
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": [" ".join(pair) for pair in tokenizer["model"]["merges"]],
        "tokenizer.ggml.eos_token_id": 4089,
        "tokenizer.ggml.padding_token_id": 4087,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": config["chat_template"],
    }


def keys() -> dict:
    config = json.loads((DEMO / "config.json").read_text())
    sizes = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": config["head_dim"],
        "attention.value_length": config["head_dim"],
        "attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        "rope.freq_base": float(config["rope_theta"]),
    }
    sizes = {f"qwen3.{name}": value for name, value in sizes.items()}
    return {"general.architecture": "qwen3", **sizes, **vocabulary(config["vocab_size"])}


def tensors(kind: int):
    """Name, shape, type and bytes of each tensor; the embedding stays bf16."""
    raw = (DEMO / "model.safetensors").read_bytes()
    (length,) = struct.unpack_from("<Q", raw)
    header = json.loads(raw[8 : 8 + length])
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        stored = name
        for theirs, ours in NAMES.items():
            stored = stored.replace(theirs, ours)
        begin, end = (8 + length + at for at in entry["data_offsets"])
        data, shape = raw[begin:end], entry["shape"]
        if len(shape) == 1:
            yield stored, shape, F32, singles(data).tobytes()
        elif kind == Q8_0 and stored != "token_embd.weight":
            yield stored, shape, Q8_0, q8_0(data)
        else:
            yield stored, shape, BF16, data


def write(path: Path, listed, **more) -> None:
    pad = lambda data: data + bytes(-len(data) % 32)  # noqa: E731
    infos, blob = b"", bytearray()
    for name, shape, kind, data in listed:
        dims = struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))
        infos += text(name) + dims + struct.pack("<IQ", kind, len(blob))
        blob += pad(data)
    metadata = {**keys(), **more}
    head = b"GGUF" + struct.pack("<IQQ", 3, len(listed), len(metadata))
    path.write_bytes(pad(head + b"".join(key(*item) for item in metadata.items()) + infos) + blob)


def demo(path: Path, kind: int) -> Path:
    """The demo model in one file."""
    write(path, list(tensors(kind)))
    return path


def demo_split(folder: Path, count: int) -> Path:
    """The demo model in several files; gives the first."""
    listed = list(tensors(BF16))
    size = -(-len(listed) // count)
    for number in range(count):
        path = folder / f"demo-{number + 1:05}-of-{count:05}.gguf"
        write(path, listed[number * size : (number + 1) * size], **{"split.no": number, "split.count": count})
    return folder / f"demo-00001-of-{count:05}.gguf"
