"""Writes the tokenizer of the modelled model into a folder: one token per byte, its id the byte's value. For bench/live.sh."""

import json
import pathlib
import sys


def alphabet() -> dict[int, str]:
    """The printable stand-in of each byte in byte-level vocabularies."""
    bytes_ = [*range(33, 127), *range(161, 173), *range(174, 256)]
    names = {byte: chr(byte) for byte in bytes_}
    others = (byte for byte in range(256) if byte not in names)
    return names | {byte: chr(256 + index) for index, byte in enumerate(others)}


def main() -> None:
    folder = pathlib.Path(sys.argv[1])
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    added = [{"id": 256 + index, "content": name, **flags} for index, name in enumerate(["<end>", "<a>", "<b>", "<c>"])]
    vocabulary = {name: byte for byte, name in alphabet().items()}
    model = {"type": "BPE", "vocab": vocabulary, "merges": []}
    tokenizer = {
        "version": "1.0",
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": level,
        "post_processor": None,
        "decoder": level,
        "model": model,
    }
    config = {"eos_token": "<end>", "model_max_length": 125000}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


if __name__ == "__main__":
    main()
