#!/usr/bin/env python3
"""Give a copy of a checkpoint a vocabulary as large as Qwen's, for measuring starts.

    make_vocabulary.py CHECKPOINT FOLDER     CHECKPOINT: the folder `hf` of make_qwen3.py; FOLDER: its files as hard links (so on the same disk), but another tokenizer.json

Byte-level BPE of 151,643 tokens and Qwen's control tokens. Tokens are merges of earlier ones, drawn with a fixed seed: words with and without a blank
in front, capitals, and characters of three bytes. So the file has the size and shape of a real one (11 MB; half of it merges), and its words are noise.
"""

import argparse
import json
import random
from pathlib import Path

COUNT = 151643
CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>", "</tool_call>"]


def byte_symbols():
    """The visible character that stands for each byte in byte-level BPE."""
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    symbols, spare = [], 256
    for byte in range(256):
        symbols.append(chr(byte if byte in visible else spare))
        spare += byte not in visible
    return symbols


def make():
    """Tokens in the order of their ids, and merges in the order of their ranks."""
    draw, symbols = random.Random(7), byte_symbols()
    names, merges, known = list(symbols), [], set(symbols)

    def merge(left, right):
        if left + right in known:
            return False
        names.append(left + right)
        known.add(left + right)
        merges.append([left, right])
        return True

    letters = [symbols[byte] for byte in b"abcdefghijklmnopqrstuvwxyz"]
    capitals = [symbols[byte] for byte in b"ABCDEFGHIJKLMNOPQRSTUVWXYZ"]
    blank = symbols[32]
    continuing = symbols[0x80:0xC0]
    leads = [symbols[byte] for byte in range(0xE3, 0xEA)]
    pairs = [lead + second for lead in leads for second in continuing]
    for pair in pairs:
        merge(pair[0], pair[1])
    parts = list(letters)
    wide = []
    while len(names) < COUNT:
        kind = draw.random()
        if kind < 0.2:
            left, right = (draw.choice(pairs), draw.choice(continuing))
            if len(wide) > 400 and draw.random() < 0.8:
                left, right = draw.choice(wide), draw.choice(wide)
            if len(left + right) <= 12 and merge(left, right):
                wide.append(left + right)
            continue
        right = parts[min(int(draw.expovariate(1 / 900)), len(parts) - 1)]
        left = blank if kind < 0.6 else draw.choice(capitals) if kind < 0.7 else draw.choice(parts)
        if len(left + right) <= 14 and merge(left, right) and kind >= 0.7:
            parts.append(left + right)
    return names, merges


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("checkpoint", type=Path)
    arguments.add_argument("folder", type=Path)
    given = arguments.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    for file in given.checkpoint.iterdir():
        link = given.folder / file.name
        if file.name != "tokenizer.json" and not link.exists():
            link.hardlink_to(file.resolve())
    names, merges = make()
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": True}
    tokenizer = {
        "version": "1.0",
        "added_tokens": [{"id": COUNT + at, "content": text, **flags} for at, text in enumerate(CONTROL)],
        "pre_tokenizer": level,
        "decoder": level,
        "model": {"type": "BPE", "vocab": {name: at for at, name in enumerate(names)}, "merges": merges},
    }
    (given.folder / "tokenizer.json").write_text(json.dumps(tokenizer, ensure_ascii=False, indent=2))


if __name__ == "__main__":
    main()
