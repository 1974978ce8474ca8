#!/usr/bin/env bash
# How long the first token takes when a prefix is on the device, on disk, on disk after a restart, or nowhere; in one run, interleaved.
#
#   bench/tiers.sh [MODEL-FOLDER]     default: the embedded demo model
#   TOKENS="2000 6000"  ROUNDS=5  THREADS=1  WORK=.work  LOCK=file  BIN=target/release/penstock
#
# Prints medians, their ratios, and what a block cost to load and to compute. Then of a prompt that waits in the gateway behind three others, its
# prefix on disk, or in Redis where that is installed: with kv_prefetch and without.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
. "$here/common.sh"
bin=${BIN:-${CARGO_TARGET_DIR:-$root/target}/release/penstock}
[ -n "${BIN:-}" ] || cargo build --release --locked --workspace --bin penstock --manifest-path "$root/Cargo.toml"
folder=$(mktemp -d "$work/tiers.XXXXXX")
trap 'rm -rf "$folder"' EXIT
timed python3 "$here/peers/tiers.py" "$bin" "$folder" --model "${1:-}" --tokens ${TOKENS:-2000 6000} --rounds "${ROUNDS:-5}" \
  --threads "${THREADS:-1}" | tee "$out/tiers.md"
machine | tee -a "$out/tiers.md"
