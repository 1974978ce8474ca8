#!/usr/bin/env python3
"""Write checkpoints of Qwen3-0.6B's shape whose matrices are random codes, as GPTQ and fp8 store them, and one in bf16.

    make_quantized_qwen3.py FOLDER    FOLDER/bf16, FOLDER/gptq4 and FOLDER/gptq4-order (groups of 128), FOLDER/fp8
                                      (blocks of 128 by 128); 3.4 GB of disk, no packages

Shapes, bytes and work are those of real models; their words are noise. Embedding and head (one table) stay in bf16, as
published checkpoints have them. Values are small, so that activations stay finite.
"""

import json
import random
import struct
import sys
from pathlib import Path

HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_DIM, INTERMEDIATE, VOCAB = 1024, 28, 16, 8, 128, 3072, 151936
GROUP = 128
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
    "eos_token_id": 151645,
}
MATRICES = {
    "self_attn.q_proj": (HEADS * HEAD_DIM, HIDDEN),
    "self_attn.k_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
    "self_attn.v_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HEADS * HEAD_DIM),
    "mlp.gate_proj": (INTERMEDIATE, HIDDEN),
    "mlp.up_proj": (INTERMEDIATE, HIDDEN),
    "mlp.down_proj": (HIDDEN, INTERMEDIATE),
}
NORMS = {
    "input_layernorm": HIDDEN,
    "post_attention_layernorm": HIDDEN,
    "self_attn.q_norm": HEAD_DIM,
    "self_attn.k_norm": HEAD_DIM,
}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": False, "checkpoint_format": "gptq"}
FORMS = {
    "bf16": None,
    "gptq4": GPTQ | {"desc_act": False},
    "gptq4-order": GPTQ | {"desc_act": True},
    "fp8": {"quant_method": "fp8", "weight_block_size": [GROUP, GROUP]},
}
# Sign, and an exponent between 2^-8 and 2^-6 with the lowest bit of it, and the fraction, from the other byte.
HIGH = bytes(byte & 0x80 | 0x3C for byte in range(256))
# Codes of fp8 that are no numbers become others.
NUMBERS = bytes(byte & ~1 if byte & 0x7F == 0x7F else byte for byte in range(256))


def numbers(draw, count):
    """Random values of bf16."""
    # A generator draws less than 2 GiB bits at once.
    pieces = [draw.randbytes(min(1 << 24, 2 * count - at)) for at in range(0, 2 * count, 1 << 24)]
    values = bytearray(b"".join(pieces))
    values[1::2] = values[1::2].translate(HIGH)
    return bytes(values)


def matrix(form, draw, rows, columns):
    """Tensors of a matrix: suffix, type, shape, bytes."""
    if form == "bf16":
        return [("weight", "BF16", [rows, columns], numbers(draw, rows * columns))]
    groups = columns // GROUP
    if form == "fp8":
        scales = struct.pack("<f", 2**-9) * (rows // GROUP * groups)
        codes = draw.randbytes(rows * columns).translate(NUMBERS)
        return [
            ("weight", "F8_E4M3", [rows, columns], codes),
            ("weight_scale_inv", "F32", [rows // GROUP, groups], scales),
        ]
    order = [column // GROUP for column in range(columns)]
    if form == "gptq4-order":
        draw.shuffle(order)
    return [
        ("qweight", "I32", [columns // 8, rows], draw.randbytes(columns // 8 * rows * 4)),
        ("qzeros", "I32", [groups, rows // 8], draw.randbytes(groups * rows // 8 * 4)),
        ("scales", "F16", [groups, rows], struct.pack("<e", 2**-8) * (groups * rows)),
        ("g_idx", "I32", [columns], struct.pack(f"<{columns}i", *order)),
    ]


def tensors(form):
    draw = random.Random(form)

    def norm(name, width):
        return (f"{name}.weight", "BF16", [width], struct.pack("<H", 0x3F80) * width)

    yield "model.embed_tokens.weight", "BF16", [VOCAB, HIDDEN], numbers(draw, VOCAB * HIDDEN)
    for layer in range(LAYERS):
        for name, (rows, columns) in MATRICES.items():
            for suffix, dtype, shape, data in matrix(form, draw, rows, columns):
                yield f"model.layers.{layer}.{name}.{suffix}", dtype, shape, data
        for name, width in NORMS.items():
            yield norm(f"model.layers.{layer}.{name}", width)
    yield norm("model.norm", HIDDEN)


def write(folder, form):
    folder.mkdir(parents=True, exist_ok=True)
    config = CONFIG | ({"quantization_config": FORMS[form]} if FORMS[form] else {})
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    header, offset = {}, 0
    # Data first, since only then the header is known.
    with open(folder / "data", "wb") as data:
        for name, dtype, shape, values in tensors(form):
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + len(values)]}
            offset += data.write(values)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(folder / "model.safetensors", "wb") as file, open(folder / "data", "rb") as data:
        file.write(struct.pack("<Q", len(text)) + text)
        while chunk := data.read(1 << 24):
            file.write(chunk)
    (folder / "data").unlink()


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    for form in FORMS:
        write(Path(sys.argv[1]) / form, form)


if __name__ == "__main__":
    main()
