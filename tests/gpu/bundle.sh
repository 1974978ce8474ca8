#!/usr/bin/env bash
# Makes the folder that `run.sh` needs on a machine with a GPU and without Rust: our binaries and the scripts. PROFILE=dev is quicker.
#
#   tests/gpu/bundle.sh FOLDER
set -euo pipefail
out=$1 profile=${PROFILE:-serve}
root=$(cd "$(dirname "$0")/../.." && pwd)
cd "$root"
mkdir -p "$out"
build() { cargo "$@" --locked --message-format json | python3 -c '
import json, sys
for line in sys.stdin:
    part = json.loads(line)
    if part.get("executable"):
        print(part["executable"])'; }
cp "$(build build --profile "$profile" -p penstock | grep "/penstock$")" "$out/penstock"
cp "$(build test --no-run --lib -p penstock-kernels | tail -1)" "$out/kernel-tests"
cp tests/gpu/run.sh tests/gpu/*.py "$out/"
rm -rf "$out/prebuilt" && cp -r kernels/cuda/prebuilt "$out/"
mkdir -p "$out/demo"
cp models/penstock-demo/tokenizer.json models/penstock-demo/tokenizer_config.json "$out/demo/"
strip "$out/penstock" "$out/kernel-tests"
du -sh "$out"
# What travels to a lent machine at once.
[ "$(du -sm "$out" | cut -f1)" -lt 64 ] || { echo "$out has 64 MiB or more" >&2; exit 1; }
