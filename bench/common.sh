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
