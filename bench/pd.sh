#!/usr/bin/env bash
# One prefill and one decode worker against two mixed ones, a core each: how long running answers wait for their next token while long
# prompts arrive, how long these wait for their first, and how much is said in all. In one run, interleaved.
#
#   bench/pd.sh [MODEL-FOLDER]     default: the embedded demo model
#   TOKENS=2000  ANSWER=200  EVERY=1.0  SECONDS_EACH=12  STREAMS=4  ROUNDS=5  WORK=.work  LOCK=file  BIN=target/release/penstock
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
. "$here/common.sh"
bin=${BIN:-${CARGO_TARGET_DIR:-$root/target}/release/penstock}
[ -n "${BIN:-}" ] || cargo build --release --locked --workspace --bin penstock --manifest-path "$root/Cargo.toml"
folder=$(mktemp -d "$work/pd.XXXXXX")
trap 'rm -rf "$folder"' EXIT
timed python3 "$here/peers/pd.py" "$bin" "$folder" --model "${1:-}" --tokens "${TOKENS:-2000}" --answer "${ANSWER:-200}" --every "${EVERY:-1.0}" \
  --seconds "${SECONDS_EACH:-12}" --streams "${STREAMS:-4}" --rounds "${ROUNDS:-5}" | tee "$out/pd.md"
machine | tee -a "$out/pd.md"
