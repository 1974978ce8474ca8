#!/usr/bin/env bash
# The engine beside llama.cpp and vLLM on the CPU, in the shape of Qwen3-0.6B with random bf16 weights, in one run.
#
#   bench/engine.sh [setup|run]      setup installs the peers into $WORK (about 8 GB, half an hour), run measures; default: both
#   THREADS="1 2"  ENGINES="penstock llama vllm"  WORK=.work  LOCK=file
#
# Prints the table of docs/benchmarks.md: prefill and decode in tokens per second, each with its share of the machine's limit,
# which is measured in the same run.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
. "$here/common.sh"
threads=${THREADS:-"1 2"}
engines=${ENGINES:-"penstock llama vllm"}
results=$out/engine.jsonl

setup() {
  need_build_tools
  if [ ! -x "$work/llama/bin/python" ]; then
    say "building llama.cpp for this CPU"
    python3 -m venv "$work/llama"
    # gcc 12 drops the stores to the AMX tile configuration with tree-dse: SIGILL on quantized models.
    CMAKE_ARGS="-DGGML_NATIVE=ON -DCMAKE_CXX_FLAGS=-fno-tree-dse" \
      "$work/llama/bin/pip" install --quiet --no-binary llama-cpp-python llama-cpp-python numpy gguf
  fi
  need_vllm
  [ -f "$work/qwen3/bf16.gguf" ] || "$work/llama/bin/python" "$here/peers/make_qwen3.py" "$work/qwen3"
}

run() {
  local target=${CARGO_TARGET_DIR:-$root/target}
  cc -O3 -march=native -pthread "$here/peers/limits.c" -o "$work/limits"
  cargo build --release --locked --example engine-bench -p penstock-engine --manifest-path "$root/Cargo.toml"
  : > "$results"
  for count in $threads; do
    # Pinned: asked for one thread, vLLM still computes on two.
    pinned=(taskset -c "0-$((count - 1))")
    timed "${pinned[@]}" "$work/limits" "$count"
    for engine in $engines; do
      case $engine in
        penstock) timed "${pinned[@]}" "$target/release/examples/engine-bench" "$work/qwen3/hf" --threads "$count" ;;
        llama) timed "${pinned[@]}" "$work/llama/bin/python" "$here/peers/bench_llama.py" "$work/qwen3/bf16.gguf" --threads "$count" ;;
        vllm) timed "${pinned[@]}" "$work/vllm/bin/python" "$here/peers/vllm_cpu.py" "$work/qwen3/hf" --threads "$count" ;;
        *) die "unknown engine $engine" ;;
      esac
    done
  done 2> "$out/engine.log" | grep --line-buffered '^{"engine"' | tee "$results" >&2
  machine
  python3 "$here/peers/table.py" "$results"
}

case ${1:-both} in
  setup) setup ;;
  run) run ;;
  both) setup; run ;;
  *) die "engine.sh [setup|run]" ;;
esac
