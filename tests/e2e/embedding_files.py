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


def folder(path: Path, pooling: str = "lasttoken") -> Path:
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
    modes = {f"pooling_mode_{name}": name.startswith(pooling) for name in ("mean_tokens", "lasttoken", "cls_token")}
    (path / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": WIDTH, **modes}))
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


def file(path: Path, kind: int = gguf_files.BF16, pooling: int = 3) -> Path:
    """The same model as a GGUF file, as converters write one: the last token's state, and an end token behind each text."""
    own = {"qwen3.pooling_type": pooling, "tokenizer.ggml.add_eos_token": True, "tokenizer.ggml.eos_token_id": END}
    gguf_files.write(path, list(gguf_files.tensors(kind)), **own)
    return path
