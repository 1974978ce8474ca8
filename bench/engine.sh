#!/usr/bin/env bash
# The engine beside llama.cpp, OpenVINO and vLLM on the CPU, in the shape of Qwen3-0.6B with random bf16 weights, in one run; and
# beside what people run where they can: weights of 8 and 4 bits in penstock and llama.cpp (the same files), and rounded by each in penstock and OpenVINO.
#
#   bench/engine.sh [setup|run]      setup installs the peers into $WORK (about 8 GB, half an hour), run measures; default: both
#   THREADS="1 2"  ENGINES="penstock penstock-int8 penstock-int4 penstock-q8_0 penstock-q4_0 llama llama-q8_0 llama-q4_0 openvino openvino-int8 openvino-int4 vllm"  WORK=.work  LOCK=file
#
# Prints the table of docs/benchmarks.md: prefill and decode in tokens per second, each with its share of the machine's limit,
# which is measured in the same run.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
. "$here/common.sh"
threads=${THREADS:-"1 2"}
engines=${ENGINES:-"penstock penstock-int8 penstock-int4 penstock-q8_0 penstock-q4_0 llama llama-q8_0 llama-q4_0 openvino openvino-int8 openvino-int4 vllm"}
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
  [[ $engines != *vllm* ]] || need_vllm
  [ -f "$work/qwen3/bf16.gguf" ] || "$work/llama/bin/python" "$here/peers/make_qwen3.py" "$work/qwen3"
  local type
  for type in q8_0 q4_0; do
    [ -f "$work/qwen3/$type.gguf" ] || [[ $engines != *$type* ]] ||
      "$work/llama/bin/python" "$here/peers/quantize_gguf.py" "$work/qwen3/bf16.gguf" "$work/qwen3/$type.gguf" "$type"
  done
  [[ $engines != *openvino* ]] || need_openvino
}

# OpenVINO in $work/openvino, and the model as it reads it.
need_openvino() {
  if [ ! -x "$work/openvino/bin/python" ]; then
    say "installing OpenVINO"
    python3 -m venv "$work/openvino"
    "$work/openvino/bin/pip" install --quiet openvino nncf optimum-intel
  fi
  [ -d "$work/qwen3/openvino" ] ||
    "$work/openvino/bin/python" "$here/peers/export_openvino.py" "$work/qwen3/hf" "$work/qwen3/openvino"
}

run() {
  local target=${CARGO_TARGET_DIR:-$root/target}
  cc -O3 -march=native -pthread "$here/peers/limits.c" -o "$work/limits"
  cargo build --release --locked --example engine-bench -p penstock-engine --manifest-path "$root/Cargo.toml"
  local bench=$target/release/examples/engine-bench
  : > "$results"
  for count in $threads; do
    # Pinned: asked for one thread, vLLM still computes on two.
    pinned=(taskset -c "0-$((count - 1))")
    timed "${pinned[@]}" "$work/limits" "$count"
    for engine in $engines; do
      case $engine in
        penstock) timed "${pinned[@]}" "$bench" "$work/qwen3/hf" --threads "$count" ;;
        penstock-int8 | penstock-int4)
          timed "${pinned[@]}" "$bench" "$work/qwen3/hf" --threads "$count" --quantize "${engine#penstock-}" --name "penstock ${engine#penstock-}" ;;
        penstock-*) timed "${pinned[@]}" "$bench" "$work/qwen3/${engine#penstock-}.gguf" --threads "$count" --name "penstock ${engine#penstock-}" ;;
        llama) timed "${pinned[@]}" "$work/llama/bin/python" "$here/peers/bench_llama.py" "$work/qwen3/bf16.gguf" --threads "$count" ;;
        llama-*) timed "${pinned[@]}" "$work/llama/bin/python" "$here/peers/bench_llama.py" "$work/qwen3/${engine#llama-}.gguf" --threads "$count" --name "llama.cpp ${engine#llama-}" ;;
        openvino) timed "${pinned[@]}" "$work/openvino/bin/python" "$here/peers/bench_openvino.py" "$work/qwen3/openvino" --threads "$count" ;;
        openvino-int8 | openvino-int4)
          timed "${pinned[@]}" "$work/openvino/bin/python" "$here/peers/bench_openvino.py" "$work/qwen3/openvino" --threads "$count" --weights "${engine#openvino-}" ;;
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
