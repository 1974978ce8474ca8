"""Checkpoints of encoders: the goldens of tests/goldens/encoders and tests/goldens/chains as folders, with the weights that their seeds give."""

import json
import math
import struct
from pathlib import Path

import gguf_files

GOLDENS = Path(__file__).parents[1] / "goldens"
MASK = 2**64 - 1


def golden(name: str, kind: str = "encoders") -> dict:
    """Case of the goldens."""
    return json.loads((GOLDENS / kind / f"{name}.json").read_text())


def uniform(seed: int, name: str, count: int):
    """Values in [-1, 1), as make_goldens.py has them."""
    key = 0xCBF29CE484222325
    for byte in f"{seed}:{name}".encode():
        key = ((key ^ byte) * 0x100000001B3) & MASK
    for index in range(1, count + 1):
        z = (key + index * 0x9E3779B97F4A7C15) & MASK
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
        yield ((z ^ (z >> 31)) >> 40) / 2**23 - 1


def weights(seed: int, name: str, shape: list[int]) -> bytes:
    """Bytes of a tensor in f32."""
    values = uniform(seed, name, math.prod(shape))
    if "norm" in name or name.endswith(("LayerNorm.weight", "_ln.weight")):
        values = [1 + 0.25 * u for u in values]
    elif name.endswith(".bias"):
        values = [0.25 * u for u in values]
    elif "embed" in name:
        values = [0.5 * u for u in values]
    else:
        factor = math.sqrt(3 / shape[1])
        values = [factor * u for u in values]
    return struct.pack(f"<{len(values)}f", *values)


def folder(path: Path, case: dict, without: tuple[str, ...] = ()) -> Path:
    """Checkpoint of a case, with the files that sentence-transformers wrote but those of `without`. Weights are f32 whatever the case stores:
    served ones are bf16."""
    path.mkdir(parents=True)
    for name, content in case["files"].items():
        if name not in without:
            (path / name).parent.mkdir(exist_ok=True)
            (path / name).write_text(json.dumps(content))
    weigh(path / "model.safetensors", case["seed"], "", case["tensors"])
    for layer, tensors in case.get("layers", {}).items():
        weigh(path / layer / "model.safetensors", case["seed"], f"{layer}.", tensors)
    return path


def weigh(path: Path, seed: int, prefix: str, tensors: list) -> None:
    """Writes the tensors of a file, whose values follow from their names behind `prefix`."""
    header, blob = {}, []
    at = 0
    for name, shape in tensors:
        data = weights(seed, prefix + name, shape)
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [at, at + len(data)]}
        blob.append(data)
        at += len(data)
    head = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(head)) + head + b"".join(blob))


NAMES = {
    "embeddings.word_embeddings": "token_embd",
    "embeddings.position_embeddings": "position_embd",
    "embeddings.token_type_embeddings": "token_types",
    "embeddings.LayerNorm": "token_embd_norm",
    "emb_ln": "token_embd_norm",
    "encoder.layer.": "blk.",
    "encoder.layers.": "blk.",
    "transformer.layer.": "blk.",
    "attention.self.query": "attn_q",
    "attention.self.key": "attn_k",
    "attention.self.value": "attn_v",
    "attention.q_lin": "attn_q",
    "attention.k_lin": "attn_k",
    "attention.v_lin": "attn_v",
    "attn.Wqkv": "attn_qkv",
    "attention.output.LayerNorm": "attn_output_norm",
    "sa_layer_norm": "attn_output_norm",
    "norm1": "attn_output_norm",
    "attention.output.dense": "attn_output",
    "attention.out_lin": "attn_output",
    "attn.out_proj": "attn_output",
    "output.LayerNorm": "layer_output_norm",
    "output_layer_norm": "layer_output_norm",
    "norm2": "layer_output_norm",
    "intermediate.dense": "ffn_up",
    "ffn.lin1": "ffn_up",
    "mlp.fc11": "ffn_up",
    "mlp.fc12": "ffn_gate",
    "output.dense": "ffn_down",
    "ffn.lin2": "ffn_down",
    "mlp.fc2": "ffn_down",
}
POOLINGS = {"mean": 1, "cls": 2, "lasttoken": 3}


def vocabulary(case: dict) -> dict:
    """Keys of a case's tokenizer, as llama.cpp's converter writes them."""
    tokenizer, named = case["files"]["tokenizer.json"], case["files"]["tokenizer_config.json"]
    model, rows = tokenizer["model"], case["config"]["vocab_size"]
    names, kinds, scores = [f"[PAD{i}]" for i in range(rows)], [5] * rows, [-10000.0] * rows
    listed = enumerate(model["vocab"]) if isinstance(model["vocab"], list) else model["vocab"].items()
    for one, other in listed:
        (at, name, score) = (one, *other) if isinstance(one, int) else (other, one, 0.0)
        names[at], kinds[at], scores[at] = name, 1, float(score)
    for added in tokenizer["added_tokens"]:
        names[added["id"]], kinds[added["id"]] = added["content"], 3
    keys = {
        "tokenizer.ggml.cls_token_id": names.index(named["cls_token"]),
        "tokenizer.ggml.seperator_token_id": names.index(named["sep_token"]),
        "tokenizer.ggml.unknown_token_id": names.index(named["unk_token"]),
        "tokenizer.ggml.padding_token_id": names.index(named["pad_token"]),
        "tokenizer.ggml.token_type": kinds,
    }
    match model["type"]:
        case "WordPiece":
            phantom = lambda name: name[2:] if name.startswith("##") else f"\u2581{name}"  # noqa: E731
            names = [name if kind == 3 else phantom(name) for name, kind in zip(names, kinds, strict=True)]
            keys |= {"tokenizer.ggml.model": "bert", "tokenizer.ggml.pre": "jina-v2-en"}
        case "Unigram":
            keys |= {"tokenizer.ggml.model": "t5", "tokenizer.ggml.pre": "default", "tokenizer.ggml.scores": scores}
        case "BPE":
            merges = [" ".join(pair) for pair in model["merges"]]
            keys |= {
                "tokenizer.ggml.model": "gpt2",
                "tokenizer.ggml.pre": "roberta-bpe",
                "tokenizer.ggml.merges": merges,
            }
    return {**keys, "tokenizer.ggml.tokens": names}


def gguf_keys(case: dict) -> dict:
    """Keys of a case's config and tokenizer."""
    config = case["config"]
    architecture = "nomic-bert" if "NomicBertModel" in config["architectures"] else "bert"
    of = lambda *names: next(config[name] for name in names if name in config)  # noqa: E731
    sizes = {
        "block_count": of("num_hidden_layers", "n_layers"),
        "context_length": config["max_position_embeddings"] - first_position(case),
        "embedding_length": of("hidden_size", "dim"),
        "feed_forward_length": of("intermediate_size", "hidden_dim"),
        "attention.head_count": of("num_attention_heads", "n_heads"),
        "attention.layer_norm_epsilon": config.get("layer_norm_eps", 1e-12),
        "attention.causal": False,
        "pooling_type": POOLINGS[case["files"]["1_Pooling/config.json"]["pooling_mode"]],
    }
    if architecture == "nomic-bert":
        sizes["rope.freq_base"] = float(config["rotary_emb_base"])
    sizes = {f"{architecture}.{name}": value for name, value in sizes.items()}
    return {"general.architecture": architecture, **sizes, **vocabulary(case)}


def first_position(case: dict) -> int:
    """Rows of the table of positions that are no position's, which converters leave out."""
    return case["config"]["pad_token_id"] + 1 if "Roberta" in case["config"]["architectures"][0] else 0


def file(path: Path, case: dict, kind: int = gguf_files.F32) -> Path:
    """The same model as a GGUF file: F32, or with those matrices of its layers as Q8_0 whose rows are whole blocks."""
    listed = []
    for theirs, whole in case["tensors"]:
        if "pooler" in theirs:
            continue
        name, shape, data = theirs, whole, weights(case["seed"], theirs, whole)
        for old, new in NAMES.items():
            name = name.replace(old, new)
        if name == "position_embd.weight":
            first = first_position(case)
            shape, data = [shape[0] - first, shape[1]], data[first * shape[1] * 4 :]
        stored = gguf_files.F32
        if kind == gguf_files.Q8_0 and len(shape) == 2 and shape[1] % 32 == 0 and name.startswith("blk."):
            stored, data = kind, gguf_files.q8_0(b"".join(data[at + 2 : at + 4] for at in range(0, len(data), 4)))
        listed.append((name, shape, stored, data))
    gguf_files.store(path, listed, gguf_keys(case))
    return path
