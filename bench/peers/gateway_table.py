#!/usr/bin/env python3
"""Turn the JSON lines of bench/gateway.sh into the table of docs/benchmarks.md.

gateway_table.py RESULTS.jsonl

Of several rounds the median counts.
"""

import argparse
import json
from collections import defaultdict
from statistics import median

ROWS = [
    ("CPU per short request, µs", "short", "cpu_us_per_request"),
    ("CPU per short request, each with its own prompt, µs", "distinct", "cpu_us_per_request"),
    ("CPU per chunk, as fast as they go, µs", "burst", "cpu_us_per_chunk"),
    ("CPU per chunk, one in 10 ms, µs", "paced", "cpu_us_per_chunk"),
    ("CPU per request with 200 kB, µs", "big", "cpu_us_per_request"),
    ("memory per slow stream, KiB", "idle", "memory_kib_per_connection"),
]
NAMES = ["nginx", "penstock", "pool"]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results")
    with open(parser.parse_args().results) as file:
        runs = defaultdict(list)
        for run in map(json.loads, file):
            runs[run["name"]].append(run)
    print("| | nginx | penstock | ratio | penstock and its pool |\n|---|---|---|---|---|")
    for title, load, field in ROWS:
        values = [
            median(found) if (found := [run[field] for run in runs[f"{name}/{load}"]]) else None for name in NAMES
        ]
        cells = ["" if value is None else f"{value:.4g}" for value in values]
        ratio = f"{values[1] / values[0]:.2f}x" if values[0] and values[1] else ""
        print(f"| {title} | {cells[0]} | {cells[1]} | {ratio} | {cells[2]} |")
    for name in NAMES[:2]:
        for run in runs[f"{name}/waves"]:
            after = " ".join(f"{value:.1f}" for value in run["memory_after_mib"])
            print(f"\nmemory of {name} after each wave of {run['connections']} streams, MiB: {after}")
    for name, rounds in runs.items():
        for run in rounds:
            if run["errors"]:
                print(f"\n{name}: {run['complete']} complete, errors {run['errors']}")


if __name__ == "__main__":
    main()
