#!/usr/bin/env python3
"""Turn the JSON lines of bench/engine.sh into the table of docs/benchmarks.md.

table.py RESULTS.jsonl

Each rate is followed by its share of the limit measured in the same run. The limit of a step is the larger of two times: its
multiply-adds (attention included) at the machine's bf16 peak, and the bytes that it must read (weights once, the KV cache of every
sequence) at the machine's bandwidth. An engine whose name ends in a type of quantized weights is held against the bytes of those, and
against the int8 peak.
"""

import argparse
import json

# The shape of Qwen3-0.6B.
LAYERS, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, VOCABULARY = 28, 1024, 16, 8, 128, 151936
# Multiply-adds times two of one token: the layers' matrices, and the head for a row whose logits are wanted.
FLOP_PER_TOKEN = 2 * LAYERS * (HIDDEN * 2048 * 2 + HIDDEN * 1024 * 2 + 3 * HIDDEN * 3072)
FLOP_PER_LOGITS = 2 * HIDDEN * VOCABULARY
# Of one token that attends over one other: the product with its key, and the one with its value.
FLOP_PER_PAIR = 4 * LAYERS * HEADS * HEAD_DIM
WEIGHT_BYTES = 1.192e9
# Bits of a quantized weight with its share of the scales, by the engine's name or its end; others have 16. Of int4 the head has 8.
QUANTIZED = {"q8_0": 8.5, "q4_0": 4.5, "int8": 8, "penstock int4": 5.5, "OpenVINO int4": 5.1}
KV_BYTES_PER_TOKEN = LAYERS * 2 * KV_HEADS * HEAD_DIM * 2
# Tokens in front of a decoded one: 128, and half of the steps that are measured.
CONTEXT = 140
# Prompt tokens that one pass over the weights serves.
PASS = 512
COLUMNS = ["prefill_512", "prefill_2048", "decode_b1", "decode_b8", "decode_b32"]


def work(column, weight_bytes):
    """Tokens, multiply-adds times two and bytes read of a prompt or a step."""
    count = int(column.removeprefix("prefill_").removeprefix("decode_b"))
    if column.startswith("prefill"):
        passes = -(-count // PASS)
        flop = count * FLOP_PER_TOKEN + FLOP_PER_LOGITS + count * (count + 1) / 2 * FLOP_PER_PAIR
        return count, flop, passes * weight_bytes + passes * count / 2 * KV_BYTES_PER_TOKEN
    flop = count * (FLOP_PER_TOKEN + FLOP_PER_LOGITS + CONTEXT * FLOP_PER_PAIR)
    return count, flop, weight_bytes + count * CONTEXT * KV_BYTES_PER_TOKEN


def share(column, row, limit):
    """Part of the limit that an engine's tokens per second reach, or nothing where none was measured."""
    engine = row["engine"]
    bits = QUANTIZED.get(engine, QUANTIZED.get(engine.split()[-1], 16))
    tokens, flop, read = work(column, WEIGHT_BYTES * bits / 16)
    peaks = ["bf16_tflop_s", "amx_tflop_s", "fp32_tflop_s"] + (["int8_top_s", "amx_int8_top_s"] if bits < 16 else [])
    flop_s = max(limit[peak] for peak in peaks) * 1e12
    if not flop_s:
        return None
    return row[column] / tokens * max(flop / flop_s, read / (limit["read_gb_s"] * 1e9))


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
            part = share(column, row, limits[row["threads"]])
            cells.append(f"{row[column]:.4g} ({part:.0%})" if part else f"{row[column]:.4g}")
        print(
            f"| {row['engine']} | {row['threads']} | " + " | ".join(cells) + f" | {row['load_s']} | {row['rss_mib']} |"
        )
    for threads, limit in sorted(limits.items()):
        print(
            f"\nLimit, {threads} thread(s): reads {limit['read_gb_s']} GB/s, bf16 {limit['bf16_tflop_s']} TFLOP/s, "
            f"int8 {limit['int8_top_s']} TOP/s, AMX {limit['amx_tflop_s']} TFLOP/s (int8 {limit['amx_int8_top_s']} TOP/s), "
            f"fp32 {limit['fp32_tflop_s']} TFLOP/s."
        )


if __name__ == "__main__":
    main()
