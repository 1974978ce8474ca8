# Sourced by the bench scripts that load a server: ports, processes that end with the script, one line of JSON per measurement.
target=${CARGO_TARGET_DIR:-$root/target}
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

# until_ready PORT: waits until the gateway says that it can serve.
until_ready() {
  for _ in $(seq 1200); do
    curl -fsS -o /dev/null "http://127.0.0.1:$1/ready" 2>/dev/null && return
    sleep 0.1
  done
  die "not ready: port $1"
}

# start_penstock NAME LISTEN: with what is on standard input as its config.
start_penstock() {
  local folder=$work/$1 listen=$2
  rm -rf "$folder" && mkdir -p "$folder"
  { printf '[log]\naccess = "off"\n'; cat; } > "$folder/penstock.toml"
  "$target/release/penstock" serve --listen "127.0.0.1:$listen" --config "$folder/penstock.toml" --state-dir "$folder/state" \
    > "$folder/serve.log" 2>&1 &
  penstock_pid=$!
  pids+=($penstock_pid)
  until_ready "$listen"
}
