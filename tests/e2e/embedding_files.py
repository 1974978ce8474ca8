"""Checkpoints of embedding models, made of the demo model: its weights, in the form in which such models are published."""

import json
import struct
from pathlib import Path

import gguf_files
from gguf_files import DEMO

# Token that the tokenizer appends to a text, whose state is the vector.
END = 4087
QUERY = "Instruct: find what answers the query\nQuery:"
WIDTH = 256


def tokenizer() -> dict:
    """Tokenizer of the demo model that ends each text with `<|endoftext|>`, as Qwen3-Embedding's does."""
    whole = json.loads((DEMO / "tokenizer.json").read_text())
    name, text = "<|endoftext|>", {"Sequence": {"id": "A", "type_id": 0}}
    end = {"SpecialToken": {"id": name, "type_id": 0}}
    template = {
        "type": "TemplateProcessing",
        "single": [text, end],
        "pair": [text, end, {"Sequence": {"id": "B", "type_id": 0}}, end],
        "special_tokens": {name: {"id": name, "ids": [END], "tokens": [name]}},
    }
    whole["post_processor"] = {"type": "Sequence", "processors": [whole["post_processor"], template]}
    return whole


def folder(path: Path) -> Path:
    """An embedding model: names of tensors without `model.`, and sentence-transformers' files."""
    (path / "1_Pooling").mkdir(parents=True)
    for name in ("tokenizer_config.json", "config.json"):
        (path / name).write_bytes((DEMO / name).read_bytes())
    (path / "tokenizer.json").write_text(json.dumps(tokenizer()))
    kinds = (("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize"))
    modules = [
        {"idx": at, "name": str(at), "path": place, "type": f"sentence_transformers.models.{kind}"}
        for at, (place, kind) in enumerate(kinds)
    ]
    (path / "modules.json").write_text(json.dumps(modules))
    pooling = {"word_embedding_dimension": WIDTH, "pooling_mode_mean_tokens": False, "pooling_mode_lasttoken": True}
    (path / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    prompts = {"prompts": {"query": QUERY, "document": ""}, "default_prompt_name": None}
    (path / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    header, blob = {}, b""
    for name, (shape, data) in gguf_files.weights().items():
        offsets = [len(blob), len(blob) + len(data)]
        header[name.removeprefix("model.")] = {"dtype": "BF16", "shape": shape, "data_offsets": offsets}
        blob += data
    head = json.dumps(header).encode()
    (path / "model.safetensors").write_bytes(struct.pack("<Q", len(head)) + head + blob)
    return path
