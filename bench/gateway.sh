#!/usr/bin/env bash
# What a request and a chunk cost the gateway alone, beside nginx in the same run.
#
#   bench/gateway.sh         WORK=.work  LOCK=file  STREAMS=2000  REQUESTS=8000  ROUNDS=3  WAVES=10
#
# nginx and penstock forward the same load (tests/load) to the same mock upstream, which writes one chunk at a time: short whole
# answers, streams as fast as they go and paced, prompts of 200 kB, many slow streams, and waves of them. Rounds alternate and their
# median counts; answers are compared byte by byte with what the mock sent (not those of the slow streams, which penstock begins with
# a comment: their first chunk takes a second). A last penstock serves the demo model from a worker
# process of its own: its figures contain what nginx does not do (chat template, tokenizing, routing, one session with the worker,
# detokenizing). CPU time is that of the gateway process alone everywhere.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
. "$here/common.sh"
. "$here/serving.sh"
streams=${STREAMS:-2000}
requests=${REQUESTS:-8000}
rounds=${ROUNDS:-3}
waves=${WAVES:-10}
results=$out/gateway.jsonl

# round NAME PID URL MODEL: what one request or chunk costs.
round() {
  run "$1/short" "$2" "$3" "$4" --connections 16 --requests "$requests" --tokens 1 --exact
  run "$1/burst" "$2" "$3" "$4" --connections 32 --requests 256 --warmup 32 --tokens 200 --stream --exact
  run "$1/paced" "$2" "$3" "$4" --connections 64 --requests 128 --warmup 16 --tokens 200 --stream --gap-ms 10 --exact
  run "$1/big" "$2" "$3" "$4" --connections 8 --requests $((requests / 8)) --tokens 1 --prompt-bytes 200000 --exact
}

# memory NAME PID URL MODEL: what many slow streams hold, and what is left of them.
memory() {
  run "$1/idle" "$2" "$3" "$4" --connections "$streams" --requests "$streams" --warmup 32 --tokens 8 --gap-ms 1000 --stream \
    --ramp-ms 2000
  run "$1/waves" "$2" "$3" "$4" --connections "$streams" --requests "$streams" --warmup 32 --tokens 4 --gap-ms 250 --stream \
    --ramp-ms 1000 --waves "$waves" --exact
}

# pool NAME PID URL MODEL: the same request where nobody can be compared with.
pool() {
  run "$1/short" "$2" "$3" "$4" --connections 16 --requests 4000 --tokens 1
  run "$1/distinct" "$2" "$3" "$4" --connections 16 --requests 4000 --tokens 1 --distinct
  run "$1/burst" "$2" "$3" "$4" --connections 32 --requests 256 --warmup 32 --tokens 200 --stream
}

start_nginx() {
  local folder=$work/nginx upstream=$1 listen=$2
  mkdir -p "$folder"
  cat > "$folder/nginx.conf" <<CONF
daemon off; master_process off; pid $folder/pid; error_log $folder/error.log warn; worker_rlimit_nofile 65536;
events { worker_connections 20000; }
http {
  access_log off; keepalive_requests 1000000; client_max_body_size 64m; client_body_buffer_size 64k; client_body_temp_path $folder/body; proxy_temp_path $folder/proxy;
  fastcgi_temp_path $folder/fastcgi; uwsgi_temp_path $folder/uwsgi; scgi_temp_path $folder/scgi;
  upstream mock { server 127.0.0.1:$upstream; keepalive 4096; keepalive_requests 1000000; }
  server {
    listen 127.0.0.1:$listen backlog=16384;
    location / {
      proxy_pass http://mock; proxy_http_version 1.1; proxy_set_header Connection ""; proxy_buffering off; proxy_request_buffering off; proxy_read_timeout 600s;
    }
  }
}
CONF
  nginx -c "$folder/nginx.conf" &
  nginx_pid=$!
  pids+=($nginx_pid)
  until_open "$listen"
}

start_worker() {
  "$target/release/penstock" worker --listen "unix://$1" > "$work/worker.log" 2>&1 &
  pids+=($!)
}

need_build_tools
have nginx || apt_install nginx-light || die "nginx is missing: install it and run again"
ulimit -n "$(ulimit -Hn)"
cargo build --release --locked --workspace --bin penstock --bin penstock-load --manifest-path "$root/Cargo.toml"
: > "$results"

upstream=$(port)
"$load" mock --listen "127.0.0.1:$upstream" &
pids+=($!)
until_open "$upstream"
nginx=$(port)
start_nginx "$upstream" "$nginx"
penstock=$(port)
start_penstock passing "$penstock" << CONF
[[providers]]
id = "mock"
base_url = "http://127.0.0.1:$upstream/v1"
models = ["mock"]
in_flight_max = 16384
CONF
passing_pid=$penstock_pid
for _ in $(seq "$rounds"); do
  round nginx "$nginx_pid" "http://127.0.0.1:$nginx" mock
  round penstock "$passing_pid" "http://127.0.0.1:$penstock" mock
done | tee -a "$results" >&2
{
  memory nginx "$nginx_pid" "http://127.0.0.1:$nginx" mock
  memory penstock "$passing_pid" "http://127.0.0.1:$penstock" mock
} | tee -a "$results" >&2
kill "$passing_pid"
start_worker "$work/worker.sock"
listen=$(port)
start_penstock pool "$listen" << CONF
[[pools]]
id = "demo"
connect = ["unix://$work/worker.sock"]
queue_max = 16384
CONF
pool pool "$penstock_pid" "http://127.0.0.1:$listen" demo | tee -a "$results" >&2
machine
python3 "$here/peers/gateway_table.py" "$results"
