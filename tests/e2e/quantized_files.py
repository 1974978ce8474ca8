"""The demo model as a GPTQ checkpoint, rounded to the nearest and packed by the standard library alone."""

import json
import shutil
import struct
from pathlib import Path

from gguf_files import DEMO, singles

GROUP = 64


def tensors(path: Path) -> dict:
    """Type, shape and bytes of each tensor of a safetensors file."""
    data = path.read_bytes()
    (length,) = struct.unpack_from("<Q", data)
    header, start = json.loads(data[8 : 8 + length]), 8 + length
    header.pop("__metadata__", None)
    return {
        name: (
            entry["dtype"],
            entry["shape"],
            data[start + entry["data_offsets"][0] : start + entry["data_offsets"][1]],
        )
        for name, entry in header.items()
    }


def write(path: Path, stored: dict):
    header, at = {}, 0
    for name, (dtype, shape, data) in stored.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + len(data)]}
        at += len(data)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(data for _, _, data in stored.values()))


def gptq(shape: list, bf16: bytes, bits: int) -> dict:
    """Tensors of a matrix `[rows, columns]`: symmetric, zero points of half of the range, stored less 1."""
    (rows, columns), values = shape, singles(bf16)
    per, groups, half = 32 // bits, columns // GROUP, 1 << (bits - 1)
    scales, codes = [[0.0] * rows for _ in range(groups)], [[0] * rows for _ in range(columns)]
    for row in range(rows):
        for group in range(groups):
            at = row * columns + group * GROUP
            part = values[at : at + GROUP]
            scale = struct.unpack("<e", struct.pack("<e", max(map(abs, part)) / (half - 1) or 1.0))[0]
            scales[group][row] = scale
            for i, value in enumerate(part):
                codes[group * GROUP + i][row] = min(max(round(value / scale) + half, 0), 2 * half - 1)
    words = bytearray()
    for first in range(0, columns, per):
        lines = codes[first : first + per]
        line = [sum(code << (bits * i) for i, code in enumerate(column)) for column in zip(*lines, strict=True)]
        words += struct.pack(f"<{rows}I", *line)
    zero = sum((half - 1) << (bits * i) for i in range(per))
    zeros = struct.pack("<I", zero) * (groups * rows // per)
    return {
        "qweight": ("I32", [columns // per, rows], bytes(words)),
        "qzeros": ("I32", [groups, rows // per], zeros),
        "scales": ("F16", [groups, rows], b"".join(struct.pack(f"<{rows}e", *line) for line in scales)),
        "g_idx": ("I32", [columns], struct.pack(f"<{columns}i", *(i // GROUP for i in range(columns)))),
    }


def demo(folder: Path, bits: int) -> Path:
    """Writes the checkpoint, in the first version of the format."""
    folder.mkdir(parents=True)
    for name in ("generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / name, folder / name)
    config = json.loads((DEMO / "config.json").read_text())
    form = dict(quant_method="gptq", bits=bits, group_size=GROUP, desc_act=False, sym=True, checkpoint_format="gptq")
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": form}))
    stored = {}
    for name, (dtype, shape, data) in tensors(DEMO / "model.safetensors").items():
        if name.endswith("_proj.weight"):
            module = name.removesuffix(".weight")
            stored |= {f"{module}.{kind}": part for kind, part in gptq(shape, data, bits).items()}
        else:
            stored[name] = (dtype, shape, data)
    write(folder / "model.safetensors", stored)
    return folder
