#!/usr/bin/env bash
# serve.sh LISTEN [ARGS...]: starts the release build, waits until it answers, prints how to talk to it, and stays with it.
set -euo pipefail
cd "$(dirname "$0")/.."
listen=$1; shift
url=http://${listen/#0.0.0.0/127.0.0.1}
bin=${CARGO_TARGET_DIR:-target}/release/penstock

"$bin" serve --listen "$listen" "$@" &
pid=$!
trap 'kill -TERM $pid 2>/dev/null || true; wait $pid || true' INT TERM

# ready: whether GET /ready answers 200. Without curl, which a fresh machine may not have.
ready() {
  local status
  exec 3<>"/dev/tcp/${listen%:*}/${listen##*:}" || return 1
  printf 'GET /ready HTTP/1.1\r\nHost: %s\r\nConnection: close\r\n\r\n' "$listen" >&3
  IFS= read -r -t 5 status <&3 || true
  exec 3>&-
  [[ $status == *" 200"* ]]
} 2>/dev/null

for _ in $(seq 600); do
  kill -0 $pid 2>/dev/null || { wait $pid; exit $?; }
  if ready; then
    cat <<TEXT

penstock answers at $url/v1

  curl $url/v1/chat/completions -H 'content-type: application/json' \\
    -d '{"model": "penstock-demo", "stream": true, "messages": [{"role": "user", "content": "What is penstock?"}]}'

Talk to it:  $bin chat --url $url
Stop it:     Ctrl-C
TEXT
    break
  fi
  sleep 0.2
done
wait $pid
