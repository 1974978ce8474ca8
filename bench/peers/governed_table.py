#!/usr/bin/env python3
"""Turn the JSON lines of bench/governed.sh into the table of docs/benchmarks.md.

governed_table.py RESULTS.jsonl

Of several rounds the median counts.
"""

import argparse
import json
from collections import defaultdict
from statistics import median

ROWS = [
    ("CPU per short request, µs", "short", "cpu_us_per_request"),
    ("CPU per chunk, as fast as they go, µs", "burst", "cpu_us_per_chunk"),
]
NAMES = ["plain", "governed", "watched"]
WHO = ["plain", "keyed", "signed"]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results")
    with open(parser.parse_args().results) as file:
        runs = defaultdict(list)
        for run in map(json.loads, file):
            runs[run["name"]].append(run)
    print("| | plain | governed | ratio | and an event plugin | ratio |\n|---|---|---|---|---|---|")
    for title, load, field in ROWS:
        plain, governed, watched = (median(run[field] for run in runs[f"{name}/{load}"]) for name in NAMES)
        print(
            f"| {title} | {plain:.4g} | {governed:.4g} | {governed / plain:.2f}x "
            f"| {watched:.4g} | {watched / plain:.2f}x |"
        )
    print("\n| CPU per short request, µs | plain | an issued key | a remembered token | ratio |\n|---|---|---|---|---|")
    plain, keyed, signed = (median(run[ROWS[0][2]] for run in runs[f"{name}/short"]) for name in WHO)
    print(f"| who asks | {plain:.4g} | {keyed:.4g} | {signed:.4g} | {signed / keyed:.2f}x |")
    for name, rounds in runs.items():
        for run in rounds:
            if run["errors"]:
                print(f"\n{name}: {run['complete']} complete, errors {run['errors']}")


if __name__ == "__main__":
    main()
