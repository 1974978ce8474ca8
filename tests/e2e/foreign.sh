#!/usr/bin/env bash
# Another real server behind penstock, and the same conversations through the official SDKs: not part of `make test`.
#
#   tests/e2e/foreign.sh vllm /path/to/vllm-venv          vLLM (CPU or GPU) with the demo model
#   tests/e2e/foreign.sh at http://127.0.0.1:8000/v1 MODEL  a server that runs already; its key in FOREIGN_KEY
#
# The demo model's answers are known, so what vLLM says is compared word for word.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
kind=${1:?vllm or at}
export FOREIGN_KEY=${FOREIGN_KEY:-sk-foreign}
python=${PYTHON:-$root/.venv/bin/python}

case $kind in
vllm)
  port=$("$python" -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
  log=$(mktemp)
  VLLM_ENABLE_RESPONSES_API_STORE=1 VLLM_CPU_KVCACHE_SPACE=1 HF_HUB_OFFLINE=1 DO_NOT_TRACK=1 \
    "${2:?the venv of vLLM}/bin/vllm" serve "$root/models/penstock-demo" --served-model-name foreign-demo \
    --host 127.0.0.1 --port "$port" --api-key "$FOREIGN_KEY" --max-model-len 4096 --enforce-eager \
    --enable-auto-tool-choice --tool-call-parser hermes --enable-prompt-tokens-details \
    --structured-outputs-config '{"disable_any_whitespace":true,"backend":"xgrammar"}' >"$log" 2>&1 &
  server=$!
  trap 'kill $server 2>/dev/null || true' EXIT
  echo "foreign: vLLM starts, its log is $log" >&2
  for _ in $(seq 600); do
    curl -sf "http://127.0.0.1:$port/health" >/dev/null && break
    kill -0 $server 2>/dev/null || { tail -20 "$log" >&2; exit 1; }
    sleep 1
  done
  export FOREIGN_URL=http://127.0.0.1:$port/v1 FOREIGN_MODEL=foreign-demo
  ;;
at)
  export FOREIGN_URL=${2:?base URL} FOREIGN_MODEL=${3:?model name}
  ;;
*)
  echo "usage: $0 vllm VENV | at URL MODEL" >&2
  exit 2
  ;;
esac
shift $(($# < 3 ? $# : 3))
PENSTOCK_BIN=${PENSTOCK_BIN:-$root/target/debug/penstock} "$python" -m pytest "$here/foreign" "$@"
