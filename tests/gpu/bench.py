"""`penstock bench` of a checkpoint: its JSON in one line, then a table. `bench.py PENSTOCK CHECKPOINT [OPTION]...`"""

import json
import subprocess
import sys


def row(name, timed):
    share = timed["share_of_limit"]
    limit = "-" if share is None else f"{100 * share:.0f} % of {timed['bound_by']}"
    print(f"{name:<16}{timed['tokens_per_second']:>12.1f} tokens/s{1e3 * timed['seconds']:>12.3f} ms   {limit}")


def main():
    command = [sys.argv[1], "bench", "--model", sys.argv[2], *sys.argv[3:], "--json"]
    print(" ".join(command), flush=True)
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        sys.exit(f"penstock bench ended with {done.returncode}: {done.stdout[-2000:]}")
    facts = json.loads(done.stdout)
    print(json.dumps(facts))
    limits = facts["limits"] or {}
    print(f"{facts['model']} on {facts['device']}: loaded in {facts['load_seconds']:.2f} s, {limits}")
    for timed in facts["prefill"]:
        row(f"prefill {timed['tokens']}", timed)
    for timed in facts["decode"]:
        row(f"decode x{timed['sequences']}", timed)


if __name__ == "__main__":
    main()
