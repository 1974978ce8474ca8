#!/usr/bin/env bash
# What a request and a chunk cost the gateway alone, beside nginx in the same run.
#
#   bench/gateway.sh         WORK=.work  LOCK=file  STREAMS=2000  REQUESTS=4000
#
# Both answer the same load (tests/load): short whole answers, streams, and many idle streams. nginx forwards to a mock upstream
# that writes one chunk at a time. penstock has no upstream to forward to: its worker is a process of its own that serves the demo
# model, so the gateway's figures contain what nginx does not do (JSON, chat template, tokenizing, detokenizing, routing, one
# session with the worker). CPU time is that of the gateway process alone in both cases.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
. "$here/common.sh"
target=${CARGO_TARGET_DIR:-$root/target}
streams=${STREAMS:-2000}
requests=${REQUESTS:-4000}
results=$out/gateway.jsonl
load=$target/release/penstock-load
pids=()

finish() { for pid in "${pids[@]}"; do kill "$pid" 2>/dev/null || true; done; }
trap finish EXIT

# port: one that nobody listens on.
port() { python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])'; }

# until_open PORT: waits for a listener.
until_open() {
  for _ in $(seq 600); do
    (exec 3<>"/dev/tcp/127.0.0.1/$1") 2>/dev/null && return
    sleep 0.1
  done
  die "nothing listens on port $1"
}

# run NAME PID URL MODEL OPTION...: one measurement, one line of JSON.
run() {
  local name=$1 pid=$2 url=$3 model=$4
  shift 4
  timed "$load" run --name "$name" --pid "$pid" --url "$url" --model "$model" "$@"
}

# measure NAME PID URL MODEL: the three loads.
measure() {
  run "$1/short" "$2" "$3" "$4" --connections 16 --requests "$requests" --tokens 1
  run "$1/stream" "$2" "$3" "$4" --connections 32 --requests 256 --warmup 32 --tokens 200 --stream
  run "$1/idle" "$2" "$3" "$4" --connections "$streams" --requests "$streams" --warmup 32 --tokens 4 --stream --ramp-ms 2000
}

start_nginx() {
  local folder=$work/nginx upstream=$1 listen=$2
  mkdir -p "$folder"
  cat > "$folder/nginx.conf" <<CONF
daemon off; master_process off; pid $folder/pid; error_log $folder/error.log warn; worker_rlimit_nofile 65536;
events { worker_connections 20000; }
http {
  access_log off; keepalive_requests 1000000; client_body_temp_path $folder/body; proxy_temp_path $folder/proxy;
  fastcgi_temp_path $folder/fastcgi; uwsgi_temp_path $folder/uwsgi; scgi_temp_path $folder/scgi;
  upstream mock { server 127.0.0.1:$upstream; keepalive 4096; keepalive_requests 1000000; }
  server {
    listen 127.0.0.1:$listen backlog=16384;
    location / {
      proxy_pass http://mock; proxy_http_version 1.1; proxy_set_header Connection ""; proxy_buffering off; proxy_read_timeout 600s;
    }
  }
}
CONF
  nginx -c "$folder/nginx.conf" &
  nginx_pid=$!
  pids+=($nginx_pid)
  until_open "$listen"
}

start_penstock() {
  local folder=$work/gateway listen=$1
  rm -rf "$folder" && mkdir -p "$folder"
  "$target/release/penstock" worker --listen "unix://$folder/worker.sock" > "$folder/worker.log" 2>&1 &
  pids+=($!)
  cat > "$folder/penstock.toml" <<CONF
[log]
access = "off"
[[pools]]
id = "demo"
connect = ["unix://$folder/worker.sock"]
queue_max = 16384
CONF
  "$target/release/penstock" serve --listen "127.0.0.1:$listen" --config "$folder/penstock.toml" > "$folder/serve.log" 2>&1 &
  penstock_pid=$!
  pids+=($penstock_pid)
  until_open "$listen"
}

need_build_tools
have nginx || apt_install nginx-light || die "nginx is missing: install it and run again"
ulimit -n "$(ulimit -Hn)"
cargo build --release --locked -p penstock -p penstock-load --manifest-path "$root/Cargo.toml"
: > "$results"

upstream=$(port)
"$load" mock --listen "127.0.0.1:$upstream" --gap-ms 5 &
pids+=($!)
until_open "$upstream"
listen=$(port)
start_nginx "$upstream" "$listen"
measure nginx "$nginx_pid" "http://127.0.0.1:$listen" mock | tee -a "$results" >&2
listen=$(port)
start_penstock "$listen"
measure penstock "$penstock_pid" "http://127.0.0.1:$listen" demo | tee -a "$results" >&2
machine
python3 "$here/peers/gateway_table.py" "$results"
