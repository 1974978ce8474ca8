"""LoRA adapters of the demo model, as PEFT writes them: random, and large enough that each changes what the model says."""

import json
import random
import struct
from array import array
from pathlib import Path

from gguf_files import DEMO

RANK = 4
# Standard deviation of the entries of B. With half of it the demo model, which is very sure of what it says, says the same.
STRENGTH = 0.5


def shapes() -> dict[str, tuple[int, int]]:
    """Outputs and inputs of the projections that the adapters change, by their names."""
    config = json.loads((DEMO / "config.json").read_text())
    hidden, heads = config["hidden_size"], config["head_dim"] * config["num_attention_heads"]
    keys, inner = config["head_dim"] * config["num_key_value_heads"], config["intermediate_size"]
    projections = {
        "self_attn.q_proj": (heads, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, heads),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    layers = range(config["num_hidden_layers"])
    return {f"model.layers.{layer}.{name}": shape for layer in layers for name, shape in projections.items()}


def folder(path: Path, seed: int) -> Path:
    """A PEFT folder; equal seeds give equal adapters."""
    path.mkdir(parents=True)
    chance = random.Random(seed)
    targets = sorted({name.rsplit(".", 1)[1] for name in shapes()})
    config = {
        "base_model_name_or_path": "penstock-demo",
        "bias": "none",
        "lora_alpha": 2 * RANK,
        "peft_type": "LORA",
        "r": RANK,
        "target_modules": targets,
        "task_type": "CAUSAL_LM",
    }
    (path / "adapter_config.json").write_text(json.dumps(config))
    header, blob = {}, b""
    for name, (outputs, inputs) in shapes().items():
        for part, shape, scale in (("A", [RANK, inputs], inputs**-0.5), ("B", [outputs, RANK], STRENGTH)):
            data = array("f", (chance.gauss(0, scale) for _ in range(shape[0] * shape[1]))).tobytes()
            offsets = [len(blob), len(blob) + len(data)]
            tensor = {"dtype": "F32", "shape": shape, "data_offsets": offsets}
            header[f"base_model.model.{name}.lora_{part}.weight"] = tensor
            blob += data
    head = json.dumps(header).encode()
    (path / "adapter_model.safetensors").write_bytes(struct.pack("<Q", len(head)) + head + blob)
    return path
