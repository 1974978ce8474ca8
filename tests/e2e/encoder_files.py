"""Checkpoints of encoders: the goldens of tests/goldens/encoders and tests/goldens/chains as folders, with the weights that their seeds give."""

import json
import math
import struct
from pathlib import Path

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
