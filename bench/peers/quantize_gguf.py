#!/usr/bin/env python3
"""Quantize a GGUF with llama.cpp, every matrix alike.

quantize_gguf.py IN.gguf OUT.gguf q8_0|q4_0
"""

import argparse

import llama_cpp as llama

TYPES = {"q8_0": llama.LLAMA_FTYPE_MOSTLY_Q8_0, "q4_0": llama.LLAMA_FTYPE_MOSTLY_Q4_0}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source")
    parser.add_argument("target")
    parser.add_argument("type", choices=TYPES)
    args = parser.parse_args()
    params = llama.llama_model_quantize_default_params()
    params.ftype, params.pure = TYPES[args.type], True
    failed = llama.llama_model_quantize(args.source.encode(), args.target.encode(), params)
    assert failed == 0, f"llama.cpp does not quantize {args.source}"


if __name__ == "__main__":
    main()
