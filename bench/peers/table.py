#!/usr/bin/env python3
"""Turn the JSON lines of bench/engine.sh into the table of docs/benchmarks.md.

table.py RESULTS.jsonl

Each rate is followed by its share of the limit that was measured in the same run: prefill against bf16 arithmetic,
decode against reading the weights once per step.
"""

import argparse
import json

# Of one token in the shape of Qwen3-0.6B: multiply-adds of the layers' matrices times two (the head runs for one row
# only), and the bytes of all weights that a step reads.
FLOP_PER_TOKEN = 2 * 28 * (1024 * 2048 * 2 + 1024 * 1024 * 2 + 3 * 1024 * 3072)
WEIGHT_BYTES = 1.192e9
COLUMNS = ["prefill_512", "prefill_2048", "decode_b1", "decode_b8", "decode_b32"]


def share(column, value, limit):
    """Part of the limit that `value` tokens per second reach, or nothing where none was measured."""
    if column.startswith("prefill"):
        flop_s = max(limit["bf16_tflop_s"], limit["amx_tflop_s"], limit["fp32_tflop_s"]) * 1e12
        return value * FLOP_PER_TOKEN / flop_s if flop_s else None
    steps_s = value / int(column.removeprefix("decode_b"))
    return steps_s * WEIGHT_BYTES / (limit["read_gb_s"] * 1e9)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results")
    with open(parser.parse_args().results) as file:
        rows = [json.loads(line) for line in file]
    limits = {row["threads"]: row for row in rows if row["engine"] == "limit"}
    print("| engine | threads | " + " | ".join(COLUMNS) + " | load s | RSS MiB |")
    print("|---" * (len(COLUMNS) + 4) + "|")
    for row in sorted((row for row in rows if row["engine"] != "limit"), key=lambda row: row["threads"]):
        cells = []
        for column in COLUMNS:
            part = share(column, row[column], limits[row["threads"]])
            cells.append(f"{row[column]:.4g} ({part:.0%})" if part else f"{row[column]:.4g}")
        print(
            f"| {row['engine']} | {row['threads']} | " + " | ".join(cells) + f" | {row['load_s']} | {row['rss_mib']} |"
        )
    for threads, limit in sorted(limits.items()):
        print(
            f"\nLimit, {threads} thread(s): reads {limit['read_gb_s']} GB/s, bf16 {limit['bf16_tflop_s']} TFLOP/s, "
            f"AMX {limit['amx_tflop_s']} TFLOP/s, fp32 {limit['fp32_tflop_s']} TFLOP/s."
        )


if __name__ == "__main__":
    main()
