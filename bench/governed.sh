#!/usr/bin/env bash
# What governing costs: the same load through penstock without and with keys, limits, the ledger and plugins, in the same run.
#
#   bench/governed.sh        WORK=.work  LOCK=file  REQUESTS=20000  ROUNDS=7
#
# All forward to the same mock upstream (tests/load). `plain` has a provider and nothing else. `governed` adds a key, a limit with
# requests, tokens, money and concurrency (so every request is reserved, settled and put into the ledger on disk) and two plugins on
# requests. `watched` adds a plugin on events: the stream is decoded and encoded anew. `keyed` and `signed` only ask who it is: by an
# issued key, and by a token of an identity provider (RS256), which is checked once and remembered then. Rounds alternate, their median
# counts. CPU time is that of the whole process, writers of ledger and log included.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
. "$here/common.sh"
. "$here/serving.sh"
requests=${REQUESTS:-20000}
rounds=${ROUNDS:-7}
results=$out/governed.jsonl
key=bench-key-0123456789abcdef

need_build_tools
ulimit -n "$(ulimit -Hn)"
cargo build --release --locked --workspace --bin penstock --bin penstock-load --manifest-path "$root/Cargo.toml"
: > "$results"

upstream=$(port)
"$load" mock --listen "127.0.0.1:$upstream" &
pids+=($!)
until_open "$upstream"
cat > "$work/prices.toml" << CONF
[[price]]
models = ["mock"]
input = 1.0
output = 4.0
CONF

provider() {
  cat << CONF
[admin]
listen = "off"
[prices]
file = "$work/prices.toml"
[[providers]]
id = "mock"
base_url = "http://127.0.0.1:$upstream/v1"
models = ["mock"]
in_flight_max = 16384
CONF
}

governed() {
  provider
  cat << CONF
[[keys]]
id = "bench"
digest = "$(printf %s "$key" | sha256sum | cut -d' ' -f1)"
limits = ["wide"]
[[limits]]
id = "wide"
requests_per_minute = 1000000000
tokens_per_minute = 1000000000
usd_per_month = 1000000
in_flight = 100000
max_tokens_default = 4096
[[plugins]]
name = "headers"
settings = { request = { set = { "x-team" = "bench" } } }
[[plugins]]
name = "tags"
settings = { set = { env = "bench" } }
CONF
}

watched() {
  governed
  cat << CONF
[[plugins]]
name = "guard"
[[plugins.settings.rules]]
name = "words"
words = ["forbidden phrase"]
action = "mask"
CONF
}

signed() {
  provider
  cat << CONF
[[jwt]]
id = "corp"
issuer = "https://sso.example.com"
audience = ["penstock"]
jwks_file = "$work/jwks.json"
CONF
}

# A token that is good for a day; the keys that it is checked by go to $work/jwks.json.
token() {
  PYTHONPATH=$root/tests/e2e python3 - "$work" << 'PROGRAM'
import json, sys, time
from pathlib import Path
from issuer import issuing

folder = Path(sys.argv[1])
with issuing(folder) as issuer:
    (folder / "jwks.json").write_text(json.dumps({"keys": [issuer.jwk]}))
    print(issuer.token("bench", iss="https://sso.example.com", exp=int(time.time()) + 86_400))
PROGRAM
}

declare -A pid listen secret
for name in plain keyed signed governed watched; do
  listen[$name]=$(port)
  secret[$name]=$key
  case $name in
    plain | keyed) provider ;;
    signed) secret[$name]=$(token) && signed ;;
    *) $name ;;
  esac > "$work/$name.conf"
  start_penstock "$name" "${listen[$name]}" < "$work/$name.conf"
  pid[$name]=$penstock_pid
done
secret[keyed]=$("$target/release/penstock" keys create --state-dir "$work/keyed/state" --name bench)
for _ in $(seq "$rounds"); do
  for name in plain keyed signed governed watched; do
    url=http://127.0.0.1:${listen[$name]}
    run "$name/short" "${pid[$name]}" "$url" mock --key "${secret[$name]}" --connections 16 --requests "$requests" --tokens 1
    case $name in keyed | signed) continue ;; esac
    run "$name/burst" "${pid[$name]}" "$url" mock --key "$key" --connections 32 --requests 256 --warmup 32 --tokens 200 --stream
  done
done | tee -a "$results" >&2
machine
python3 "$here/peers/governed_table.py" "$results"
