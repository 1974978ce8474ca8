"""GGUF files of the demo model, and mixtures of experts made of it, written by the standard library alone."""

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
    "mlp.gate.": "ffn_gate_inp.",
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
        case [float(), *_]:
            return text(name) + struct.pack(f"<IIQ{len(value)}f", 9, 6, len(value), *value)
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


def keys(architecture: str = "qwen3") -> dict:
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
    if architecture == "qwen3moe":
        width = config["intermediate_size"] // CHOSEN
        sizes |= {"expert_count": EXPERTS, "expert_used_count": CHOSEN, "expert_feed_forward_length": width}
    sizes = {f"{architecture}.{name}": value for name, value in sizes.items()}
    return {"general.architecture": architecture, **sizes, **vocabulary(config["vocab_size"])}


def weights() -> dict[str, tuple[list[int], bytes]]:
    """Shape and bf16 values of each tensor of the demo model, by its name there."""
    raw = (DEMO / "model.safetensors").read_bytes()
    (length,) = struct.unpack_from("<Q", raw)
    header = json.loads(raw[8 : 8 + length])
    header.pop("__metadata__", None)
    part = lambda offsets: raw[8 + length + offsets[0] : 8 + length + offsets[1]]  # noqa: E731
    return {name: (entry["shape"], part(entry["data_offsets"])) for name, entry in header.items()}


def tensors(kind: int, model: dict | None = None):
    """Name, shape, type and bytes of each tensor; embedding and routers stay bf16."""
    for name, (shape, data) in (model or weights()).items():
        stored = name
        for theirs, ours in NAMES.items():
            stored = stored.replace(theirs, ours)
        if len(shape) == 1:
            yield stored, shape, F32, singles(data).tobytes()
        elif kind == Q8_0 and stored != "token_embd.weight" and "_inp" not in stored:
            yield stored, shape, Q8_0, q8_0(data)
        else:
            yield stored, shape, BF16, data


def write(path: Path, listed, architecture: str = "qwen3", **more) -> None:
    """Writes tensors with the keys of the demo model and more."""
    store(path, listed, {**keys(architecture), **more})


def store(path: Path, listed, metadata: dict) -> None:
    """Writes a file: name, shape, type and bytes of each tensor, and the keys."""
    pad = lambda data: data + bytes(-len(data) % 32)  # noqa: E731
    infos, blob = b"", bytearray()
    for name, shape, kind, data in listed:
        dims = struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))
        infos += text(name) + dims + struct.pack("<IQ", kind, len(blob))
        blob += pad(data)
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


EXPERTS, CHOSEN = 4, 2
PARTS = ("gate_proj", "up_proj", "down_proj")


def mixture(routers: str) -> dict[str, tuple[list[int], bytes]]:
    """The demo model with four experts in each layer, of which a token chooses two. The first two are the halves of the layer's MLP, their
    way down doubled; the others are halves of its neighbour's.

    `routers`: "equal" has all logits 0, so that the first two experts are chosen, with a weight of a half each: the demo model itself;
    "mixed" chooses by the token.
    """
    demo, config = weights(), json.loads((DEMO / "config.json").read_text())
    layers, hidden, width = config["num_hidden_layers"], config["hidden_size"], config["intermediate_size"] // CHOSEN
    model = {name: tensor for name, tensor in demo.items() if ".mlp." not in name}
    for layer in range(layers):
        block = f"model.layers.{layer}.mlp"
        queries = demo[f"model.layers.{layer}.self_attn.q_proj.weight"][1]
        size = EXPERTS * hidden * 2
        model[f"{block}.gate.weight"] = ([EXPERTS, hidden], bytes(size) if routers == "equal" else queries[:size])
        for expert in range(EXPERTS):
            source = f"model.layers.{(layer + expert // CHOSEN) % layers}.mlp"
            half = expert % CHOSEN
            for part in PARTS[:2]:
                data = demo[f"{source}.{part}.weight"][1]
                rows = len(data) // CHOSEN
                model[f"{block}.experts.{expert}.{part}.weight"] = (
                    [width, hidden],
                    data[half * rows : (half + 1) * rows],
                )
            values = array("H", demo[f"{source}.down_proj.weight"][1])
            columns = [values[row * CHOSEN * width + half * width :][:width] for row in range(hidden)]
            doubled = array("H", [value + 0x80 if value & 0x7F80 else value for row in columns for value in row])
            model[f"{block}.experts.{expert}.down_proj.weight"] = [hidden, width], doubled.tobytes()
    return model


def mixture_folder(folder: Path, routers: str) -> Path:
    """A mixture as a checkpoint folder."""
    folder.mkdir(parents=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((DEMO / name).read_bytes())
    config = json.loads((DEMO / "config.json").read_text())
    own = {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": EXPERTS}
    own |= {"num_experts_per_tok": CHOSEN, "moe_intermediate_size": config["intermediate_size"] // CHOSEN}
    (folder / "config.json").write_text(json.dumps({**config, **own, "norm_topk_prob": True}))
    header, at, model = {}, 0, mixture(routers)
    for name, (shape, data) in model.items():
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [at, at + len(data)]}
        at += len(data)
    head = json.dumps(header).encode()
    blob = b"".join(data for _, data in model.values())
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(head)) + head + blob)
    return folder


def mixture_file(path: Path, routers: str, kind: int) -> Path:
    """A mixture as a GGUF file, which has the experts of a layer in one tensor of three dimensions."""
    model, stacked = mixture(routers), {}
    for name in list(model):
        block, _, rest = name.partition(".mlp.experts.")
        if rest:
            shape, data = model.pop(name)
            part = rest.split(".")[1].removesuffix("_proj")
            whole = stacked.setdefault(f"{block}.ffn_{part}_exps.weight", ([EXPERTS, *shape], bytearray()))
            whole[1].extend(data)
    model |= {name: (shape, bytes(data)) for name, (shape, data) in stacked.items()}
    write(path, list(tensors(kind, model)), "qwen3moe")
    return path
