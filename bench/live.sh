#!/usr/bin/env bash
# Routing over HTTP, live: the same fleet of modelled-time engines behind penstock and behind smg (PyPI), the same trace, in the same run.
#
#   bench/live.sh TRACE.jsonl[.gz]     WORK=.work  ENGINES=8  SPEED=5  EACH=8  LIMIT=1500  SKIP=0  RATES="1 1.7"  ROUNDS=1  SMG=1.13.0
#
# An engine is a real worker process (engine, scheduler, prefix cache, session) over a device that only takes time
# (tests/fleet, modelled-worker). penstock routes over the workers themselves. smg speaks HTTP to its engines: each of its engines is a
# penstock with one such worker. The load (tests/load, replay) checks every token of every stream.
# Then an engine is killed (worker and, behind smg, its HTTP server) in the middle of 400 requests: streams cut, refused, wrong.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
. "$here/common.sh"
. "$here/serving.sh"
trace=${1:?a trace: JSON lines, may be gzipped}
engines=${ENGINES:-8} speed=${SPEED:-5} each=${EACH:-8} limit=${LIMIT:-1500} skip=${SKIP:-0} rates=${RATES:-"1 1.7"} rounds=${ROUNDS:-1}
results=$out/live.jsonl
fleet=$work/live
need_build_tools
ulimit -n "$(ulimit -Hn)"
cargo build --release --locked --workspace --bin penstock --bin penstock-load --bin modelled-worker --manifest-path "$root/Cargo.toml"
modelled=$(dirname "$load")/modelled-worker
rm -rf "$fleet"; mkdir -p "$fleet/model"
: > "$results"

if [ ! -x "$work/smg/bin/smg" ]; then
  say "installing smg from PyPI"
  python3 -m venv "$work/smg" && "$work/smg/bin/pip" install --quiet "smg==${SMG:-1.13.0}"
fi
case $trace in *.gz) gzip -dc "$trace" ;; *) cat "$trace" ;; esac > "$fleet/trace.jsonl"
python3 "$here/live-tokenizer.py" "$fleet/model"

worker() { # NAME: its process is the last of `pids`
  "$modelled" --listen "unix://$fleet/$1.sock" --tokenizer "$fleet/model/tokenizer.json" --speed "$speed" --tokens-each "$each" \
    > "$fleet/$1.log" 2>&1 &
  pids+=($!)
}

gateway() { # NAME PORT WORKER...
  local name=$1 port=$2
  shift 2
  start_penstock "live-$name" "$port" << CONF
[admin]
listen = "off"
[[pools]]
id = "modelled"
model = "$fleet/model"
connect = [$(printf '"unix://%s.sock",' "${@/#/$fleet/}")]
CONF
}

# Starts a fleet; `url` is where it serves, `victim` and what follows the processes of one engine.
start() {
  local index ports=()
  pids=() victim=()
  case $1 in
    penstock)
      for index in $(seq "$engines"); do worker "w$index"; done
      victim=("${pids[0]}")
      local port
      port=$(port)
      gateway gateway "$port" $(seq -f 'w%g' "$engines")
      url=http://127.0.0.1:$port
      ;;
    smg*)
      for index in $(seq "$engines"); do
        ports+=("$(port)")
        worker "w$index"
        gateway "g$index" "${ports[-1]}" "w$index"
      done
      victim=("${pids[@]:0:2}")
      local front metrics
      front=$(port) metrics=$(port)
      "$work/smg/bin/smg" launch --worker-urls "${ports[@]/#/http://127.0.0.1:}" --policy "${1#smg-}" --host 127.0.0.1 --port "$front" \
        --prometheus-port "$metrics" --log-level warn > "$fleet/smg.log" 2>&1 &
      pids+=($!)
      until_open "$front"
      url=http://127.0.0.1:$front
      ;;
  esac
  until curl -fs -o /dev/null --max-time 5 "$url/v1/completions" -H 'content-type: application/json' \
    -d '{"model":"modelled","prompt":"warm","max_tokens":1}'; do sleep 0.2; done
}

stop() {
  kill "${pids[@]}" 2> /dev/null || true
  wait "${pids[@]}" 2> /dev/null || true
  pids=()
}

replay() { # NAME RATE LIMIT
  timed "$load" replay --url "$url" --trace "$fleet/trace.jsonl" --name "$1" --rate "$2" --limit "$3" --skip "$skip" --speed "$speed" \
    --tokens-each "$each" | tee -a "$results"
}

for round in $(seq "$rounds"); do
  for rate in $rates; do
    for system in penstock smg-cache_aware smg-round_robin; do
      start "$system"
      replay "$system" "$rate" "$limit"
      stop
    done
  done
done

for system in penstock smg-cache_aware; do
  start "$system"
  replay "$system, one engine killed" 1 400 &
  sleep "${KILL_AFTER:-12}"
  kill -9 "${victim[@]}"
  wait $!
  stop
done

machine
python3 - "$results" << 'PY'
import json, sys
print("| system | rate | hit % | in SLO % | TTFT p50 / p99 s | TPOT p50 / p99 ms | refused | cut | wrong |\n|---|---|---|---|---|---|---|---|---|")
for line in open(sys.argv[1]):
    r = json.loads(line)
    t, p = r["ttft_s"], r["tpot_ms"]
    print(f"| {r['name']} | {r['rate']} | {r['hit_percent']:.1f} | {r['in_slo_percent']:.1f} | {t['p50']} / {t['p99']} | {p['p50']} / {p['p99']} | {r['refused']} | {r['cut']} | {r['wrong']} |")
PY
