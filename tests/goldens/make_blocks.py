#!/usr/bin/env python3
"""Write blocks.txt: random blocks of each GGUF format, and the weights that gguf-py (0.19.0) reads from them.

    make_blocks.py > blocks.txt          needs numpy and gguf

A line has the format's name, the bytes of 256 weights, and the weights as little-endian f32, both in hexadecimal.
"""

import numpy as np
from gguf import GGMLQuantizationType as Type
from gguf.quants import dequantize

# Format, bytes and weights of a block, and where its half-precision numbers lie.
FORMATS = [
    (Type.Q8_0, 34, 32, [0]),
    (Type.Q4_0, 18, 32, [0]),
    (Type.Q4_1, 20, 32, [0, 2]),
    (Type.Q5_0, 22, 32, [0]),
    (Type.Q5_1, 24, 32, [0, 2]),
    (Type.Q2_K, 84, 256, [80, 82]),
    (Type.Q3_K, 110, 256, [108]),
    (Type.Q4_K, 144, 256, [0, 2]),
    (Type.Q5_K, 176, 256, [0, 2]),
    (Type.Q6_K, 210, 256, [208]),
    (Type.IQ4_NL, 18, 32, [0]),
    (Type.MXFP4, 17, 32, []),
    (Type.IQ4_XS, 136, 256, [0]),
]


def main():
    rng = np.random.default_rng(5)
    for kind, size, values, halves in FORMATS:
        count = 256 // values
        blocks = rng.integers(0, 256, (count, size), dtype=np.uint8)
        for at in halves:
            numbers = rng.uniform(0.01, 0.2, count).astype("<f2")
            blocks[:, at : at + 2] = numbers.view(np.uint8).reshape(count, 2)
        if kind == Type.MXFP4:
            blocks[:, 0] = rng.integers(120, 130, count)
            blocks[0, 0] = 1
        weights = dequantize(blocks.reshape(1, -1), kind).astype("<f4")
        print(kind.name.lower(), blocks.tobytes().hex(), weights.tobytes().hex())


if __name__ == "__main__":
    main()
