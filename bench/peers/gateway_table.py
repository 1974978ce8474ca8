#!/usr/bin/env python3
"""Turn the JSON lines of bench/gateway.sh into the table of docs/benchmarks.md.

gateway_table.py RESULTS.jsonl
"""

import argparse
import json

ROWS = [
    ("CPU per short request, µs", "short", "cpu_us_per_request"),
    ("CPU per chunk, µs", "stream", "cpu_us_per_chunk"),
    ("memory per open stream, KiB", "idle", "memory_kib_per_connection"),
    ("memory at the most, MiB", "idle", "memory_mib"),
]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results")
    with open(parser.parse_args().results) as file:
        runs = {run["name"]: run for run in map(json.loads, file)}
    names = sorted({name.split("/")[0] for name in runs})
    print("| | " + " | ".join(names) + " |\n" + "|---" * (len(names) + 1) + "|")
    for title, load, field in ROWS:
        print(f"| {title} | " + " | ".join(f"{runs[f'{name}/{load}'][field]:.4g}" for name in names) + " |")
    for name, run in runs.items():
        if run["errors"]:
            print(f"\n{name}: {run['complete']} complete, errors {run['errors']}")


if __name__ == "__main__":
    main()
