#!/usr/bin/env python3
"""Convert a checkpoint folder to OpenVINO's format with optimum-intel, weights as they are.

export_openvino.py FOLDER OUT
"""

import argparse

from optimum.intel import OVModelForCausalLM


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source")
    parser.add_argument("target")
    args = parser.parse_args()
    model = OVModelForCausalLM.from_pretrained(
        args.source, export=True, compile=False, load_in_8bit=False, local_files_only=True
    )
    model.save_pretrained(args.target)


if __name__ == "__main__":
    main()
