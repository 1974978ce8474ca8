#!/usr/bin/env bash
# Everything that a GPU has to show, on a bare machine: the driver, Python with PyTorch, and the folder that `bundle.sh` makes.
#
#   run.sh [PART]...     parts: machine, kernels, tokens, ceilings, times, bench, serve, peers; the first five without arguments
#
# bench, serve and peers take SHAPES (see checkpoint.py; "qwen3-0.6b llama3-8b" by default, serve the first one) and write checkpoints of random weights
# to CHECKPOINTS (/dev/shm/penstock), which stay for the next part.
#
# Each part appends its lines to results.txt, ends within ten minutes, and a failure of one does not keep the others from running. The exit
# code is 1 if a part failed.
set -uo pipefail
cd "$(dirname "$0")"
results=${RESULTS:-results.txt}
failed=0
export SHAPES="${SHAPES:-qwen3-0.6b llama3-8b}" CHECKPOINTS="${CHECKPOINTS:-/dev/shm/penstock}" DEVICE="${DEVICE:-cuda}"

machine() {
  nvidia-smi --query-gpu=name,driver_version,memory.total,compute_cap --format=csv,noheader || echo "nvidia-smi does not run"
  ./penstock check | grep "^  GPU  .* kernels sm_"
}

# The suite that compares every operation with the reference, and the bits of a token over chunk sizes, batches and cached prefixes, on the
# GPU in place of the stand-in. Left out: tests that ask the stand-in for a fault.
kernels() {
  PENSTOCK_CUDA_TESTS=driver ./kernel-tests cuda::tests --test-threads 1 \
    --skip a_gpu_that_is_lost --skip too_little_memory --skip what_stands_between --skip a_step_reports_what_fails
}

# Greedy tokens of the demo model from the real server, against those of the CPU.
tokens() { python3 tokens.py ./penstock; }

# What the machine can do: bytes of a copy and of a read, bf16 products on random data.
ceilings() { python3 ceilings.py; }

# Every product and attention kernel: bits of a row in steps of every size, distance from float64, time beside cuBLAS and PyTorch's attention.
times() { python3 kernels.py prebuilt; }

# Writes the checkpoint of a shape, unless it is there.
checkpoint() {
  [ -e "$CHECKPOINTS/$1/model.safetensors.index.json" ] || python3 checkpoint.py "$CHECKPOINTS/$1" "$1"
}

# The whole engine on known shapes: prefill and decode, beside the GPU's bandwidth.
bench() {
  local shape failed=0
  for shape in $SHAPES; do
    checkpoint "$shape" && timeout 240 python3 bench.py ./penstock "$CHECKPOINTS/$shape" --device "$DEVICE" --batch-tokens "${BATCH_TOKENS:-2048}" \
      --prefill "${PREFILL:-512,2048,8192}" --decode "${DECODE:-1,32,256}" --context "${CONTEXT:-1024}" || failed=1
  done
  return $failed
}

# The server and its clients: streams at once.
serve() {
  local shape=${SHAPES%% *}
  checkpoint "$shape" && python3 serve.py ./penstock "$CHECKPOINTS/$shape" "$DEVICE" "${STREAMS:-1,32,256}" "${ANSWER:-256}"
}

# PyTorch with the same shapes.
peers() {
  local shape failed=0
  for shape in $SHAPES; do
    timeout 240 python3 peers.py "$shape" "${DECODE:-1,32,256}" "${CONTEXT:-1024}" "${PEER_PREFILL:-2048,8192}" || failed=1
  done
  return $failed
}

run() {
  local part=$1 status
  echo "== $part" | tee -a "$results"
  timeout --kill-after=10 600 bash -c "set -o pipefail; $(declare -f checkpoint "$part"); $part" 2>&1 | tee -a "$results"
  status=${PIPESTATUS[0]}
  [ "$status" = 0 ] || { failed=1; echo "$part: FAILED ($status)" | tee -a "$results"; }
}

date -u +"-- %Y-%m-%d %H:%M" | tee -a "$results"
parts=("$@")
[ $# -gt 0 ] || parts=(machine kernels tokens ceilings times)
for part in "${parts[@]}"; do run "$part"; done
exit $failed
