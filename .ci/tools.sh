# Sourced by the Makefile: checks for the tools that a step needs, installs what can be installed, and says what it does.
# Everything that is not a system package goes to .venv and node_modules inside the repository.
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=$root/.venv
e2e=$root/tests/e2e
[ -d "$HOME/.cargo/bin" ] && PATH=$HOME/.cargo/bin:$PATH
[ -d "$venv/bin" ] && PATH=$PATH:$venv/bin
export PATH

say() { printf 'make: %s\n' "$*" >&2; }
die() { say "$*"; exit 1; }
have() { command -v "$1" >/dev/null 2>&1; }

# fetch COMMAND...: something from a package registry, tried three times, since registries fail now and then. What a failed try printed is shown.
fetch() {
  local try printed status
  for try in 1 2 3; do
    printed=$("$@" 2>&1) && return
    status=$?
    printf '%s\n' "$printed" | tail -n 40 >&2
    say "try $try of 3 failed (exit $status): $*"
    [ "$try" = 3 ] || sleep $((try * 5))
  done
  return "$status"
}

# pip_install ENVIRONMENT ARGUMENTS...: with uv, which takes a seventh of pip's CPU time; what it cannot reach is left to pip, with its tries.
pip_install() {
  local environment=$1 uv=$venv/bin/uv
  shift
  if [ ! -x "$uv" ]; then "$venv/bin/pip" install --quiet --disable-pip-version-check uv==0.13.9 || say "uv cannot be installed: using pip"; fi
  if [ -x "$uv" ]; then
    "$uv" pip install --quiet --python "$environment/bin/python" "$@" && return
    say "uv failed: using pip"
  fi
  fetch "$environment/bin/pip" install --quiet --disable-pip-version-check "$@"
}

# built PROFILE: path of the binary.
built() { printf '%s/%s/penstock' "${CARGO_TARGET_DIR:-$root/target}" "$1"; }

# apt_install PACKAGE...: installs system packages where that is possible without a question.
apt_install() {
  local run=()
  have apt-get || return 1
  if [ "$(id -u)" != 0 ]; then sudo -n true 2>/dev/null && run=(sudo -n) || return 1; fi
  say "installing $* with apt-get"
  fetch "${run[@]}" apt-get update -qq && fetch "${run[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq "$@"
}

# deb_download PACKAGE: the package's file, into this folder.
deb_download() { fetch apt-get download -qq -o APT::Sandbox::User=root "$1"; }

# in_venv TOOL...: the repository's Python environment, made on first use.
in_venv() {
  have python3 || apt_install python3 python3-venv || die "python3 is needed for $*: install it and run again"
  if [ ! -x "$venv/bin/python" ]; then
    say "making a Python environment in .venv for $*"
    python3 -m venv "$venv" || { apt_install python3-venv && python3 -m venv "$venv"; } || die "python3 -m venv failed"
  fi
  PATH=$PATH:$venv/bin
}

need_rust() {
  have cargo && return
  die "Rust is missing: install rustup (the package of your system or https://rustup.rs) and run again; rust-toolchain.toml names the version"
}

need_cc() {
  { have cc && have c++; } || apt_install gcc g++ libc6-dev || die "a C and C++ compiler are missing (cc, c++): install gcc and g++"
}

# cmake builds zlib for the HTTP library.
need_cmake() {
  have cmake && return
  apt_install cmake && return
  in_venv cmake
  say "installing cmake from PyPI into .venv"
  pip_install "$venv" cmake
}

need_build_tools() { need_rust; need_cc; need_cmake; }

# The servers that the store's tests start for themselves, each in a folder of its own.
need_stores() {
  have_stores || apt_install postgresql redis-server || true
  have_stores || die "PostgreSQL and Redis are missing: install them (Debian: postgresql and redis-server)"
}

have_stores() {
  have redis-server && { have initdb || ls /usr/lib/postgresql/*/bin/initdb >/dev/null 2>&1; }
}

# The official SDKs that the end-to-end tests drive. The stamp holds what was asked for, so that a change installs anew.
need_test_tools() {
  in_venv "the end-to-end tests"
  if ! cmp -s "$e2e/requirements.txt" "$venv/requirements.stamp"; then
    say "installing the Python SDKs and pytest into .venv"
    pip_install "$venv" -r "$e2e/requirements.txt"
    cp "$e2e/requirements.txt" "$venv/requirements.stamp"
  fi
  have chromium || apt_install chromium || die "Chromium is missing, which the test of the web console drives: install chromium"
  { have node && have npm; } || apt_install nodejs npm || die "node and npm are missing: install nodejs 18 or newer"
  if ! cmp -s "$e2e/package-lock.json" "$e2e/node_modules/.stamp"; then
    say "installing the Node SDK into tests/e2e/node_modules"
    fetch npm ci --no-audit --no-fund --prefix "$e2e"
    cp "$e2e/package-lock.json" "$e2e/node_modules/.stamp"
  fi
}

# The libraries that people build on the SDKs: large, and held at other versions than the SDKs, so in an environment of their own.
need_client_tools() {
  in_venv "the tests of client libraries"
  local clients=$root/.venv-clients
  cmp -s "$e2e/requirements-clients.txt" "$clients/requirements.stamp" && return
  say "installing LangChain, LlamaIndex, LiteLLM and others into .venv-clients (some minutes)"
  python3 -m venv "$clients"
  pip_install "$clients" -r "$e2e/requirements-clients.txt"
  cp "$e2e/requirements-clients.txt" "$clients/requirements.stamp"
}

# Helm as a library, Kubernetes' schemas and others in an environment of their own; promtool is taken out of Debian's package, which is not
# installed: it would start a server.
need_package_tools() {
  in_venv "the tests of packages"
  local packages=$root/.venv-packages asked=$root/tests/packages/requirements.txt
  have systemd-analyze || apt_install systemd || die "systemd-analyze is missing, which checks the unit: install systemd"
  if ! cmp -s "$asked" "$packages/requirements.stamp"; then
    say "installing Helm's library and linters into .venv-packages"
    python3 -m venv "$packages"
    pip_install "$packages" -r "$asked"
    cp "$asked" "$packages/requirements.stamp"
  fi
  PATH=$PATH:$packages/bin
  have promtool && return
  say "taking promtool out of Debian's package prometheus"
  local work=$packages/promtool
  mkdir -p "$work"
  (cd "$work" && { deb_download prometheus || { apt-get update -qq && deb_download prometheus; }; }) ||
    die "promtool is missing, which checks the alert rules: install prometheus"
  dpkg-deb -x "$work"/prometheus_*.deb "$work" && cp "$work/usr/bin/promtool" "$packages/bin/" && rm -r "$work"
}

# What makes and opens root file systems.
need_root_tools() {
  [ "$(id -u)" = 0 ] || die "the tests that install packages need root (chroot, mount): run them as root, or in a container"
  { have mmdebstrap && have umoci && have strace; } || apt_install mmdebstrap umoci strace || die "mmdebstrap, umoci and strace are missing: install them"
}

# NVIDIA's compiler library in an environment of its own; the wheel's hash is pinned.
need_nvrtc() {
  in_venv "the compiler of the CUDA kernels"
  local nvrtc=$root/.venv-nvrtc asked=$root/.ci/nvrtc.txt
  cmp -s "$asked" "$nvrtc/requirements.stamp" && return
  say "installing NVRTC into .venv-nvrtc (90 MB)"
  python3 -m venv "$nvrtc"
  pip_install "$nvrtc" --require-hashes -r "$asked"
  cp "$asked" "$nvrtc/requirements.stamp"
}

# run_kernelc check|verify|build
run_kernelc() {
  local library
  library=$(echo "$root"/.venv-nvrtc/lib/python3*/site-packages/nvidia/cuda_nvrtc/lib)
  LD_LIBRARY_PATH=$library "$(dirname "$(built debug)")/kernelc" "$1"
}

# run_package_tests [pytest arguments]
run_package_tests() {
  PENSTOCK_BIN=${PENSTOCK_BIN:-$(built debug)} timeout --kill-after=10 3000 "$root/.venv-packages/bin/python" -m pytest "$root/tests/packages" "$@"
}

# build_program NAME: of the parts that the unit tests have compiled. A small test target is named with it: only where a target asks for
# dev-dependencies does Cargo give shared crates the features that those want, and with other features some fifty crates would be compiled
# again. `make doc` checks the programs without those features.
build_program() { cargo build --workspace --locked --test book --bin "$@"; }

# Property tests draw the same cases in every run, so that a change is judged by what it changes; `make properties` draws new ones.
# nextest runs each test in its own process and in parallel; plain cargo test does the same work one crate after another.
run_unit_tests() {
  export PROPTEST_RNG_SEED=${PROPTEST_RNG_SEED:-2026}
  if have cargo-nextest; then
    cargo nextest run --workspace --locked --lib --bins --tests --no-fail-fast
  else
    say "cargo-nextest is not installed: using cargo test"
    cargo test --workspace --locked --lib --bins --tests --no-fail-fast
  fi
}

# property_names: names of the tests in `proptest! { … }`.
property_names() {
  git -C "$root" grep -lz 'proptest! {' -- '*.rs' | (cd "$root" && xargs -0 awk '
    /^ *(proptest::)?proptest! \{/ { match($0, /^ */); end = substr($0, 1, RLENGTH) "}"; inside = 1 }
    inside && $0 == end { inside = 0 }
    inside && match($0, /fn [a-z0-9_]+\(/) { print substr($0, RSTART + 3, RLENGTH - 4) }') | sort -u
}

# run_properties ROUNDS: each property with new cases in each round; proptest notes a case that fails beside its test.
run_properties() {
  local round filter
  have cargo-nextest || die "cargo-nextest is missing: cargo install cargo-nextest"
  filter=$(property_names | sed 's/.*/test(\/(^|::)&$\/)/' | paste -sd '+')
  for ((round = 1; round <= $1; round++)); do
    say "properties, round $round of $1"
    env -u PROPTEST_RNG_SEED cargo nextest run --workspace --locked --lib --bins --tests --no-fail-fast --status-level fail --final-status-level none -E "$filter" || return
  done
}

# The feature is tested apart: its compiler takes two to three minutes to build. The whole workspace is selected each time, so that
# what both builds have in common is built once.
run_wasm_tests() {
  local feature=(--workspace --lib --bins --tests --features penstock/wasm --locked)
  if have cargo-nextest; then
    cargo nextest run "${feature[@]}" --features penstock-fuzz/wasm -E 'package(penstock-wasm) | (package(penstock-fuzz) & test(plugin))'
  else
    cargo test -p penstock-wasm --features host --locked
    cargo test -p penstock-fuzz --features wasm --locked plugin
  fi
  build_program penstock --features penstock/wasm
  PENSTOCK_BIN=$(built debug) timeout --kill-after=10 600 "$venv/bin/python" -m pytest "$e2e/test_wasm.py"
}

# A ceiling for the whole run: a hang is a failure, not a wait.
# Two at a time, each a file, in the order of tests/e2e/conftest.py: most of the tests wait. Their folders have short paths, since sockets lie in them, and stay where a test fails.
run_e2e_tests() {
  local folder
  folder=$(mktemp -d "${TMPDIR:-/tmp}/e2e-XXXXXX")
  PENSTOCK_BIN=${PENSTOCK_BIN:-$(built debug)} timeout --kill-after=10 2700 "$venv/bin/python" -m pytest "$e2e" \
    -n 2 --dist loadfile --no-loadscope-reorder --basetemp "$folder" "$@"
  rm -rf "$folder"
}

run_client_tests() {
  PENSTOCK_BIN=${PENSTOCK_BIN:-$(built debug)} timeout --kill-after=10 1800 "$root/.venv-clients/bin/python" -m pytest "$e2e/clients" "$@"
}

# run_fuzz MINUTES [TARGET]: coverage-guided search with the stable compiler, so without sanitizers: Rust's own checks are on. New inputs
# gather in target/fuzz/found, inputs that break a promise in target/fuzz/broken.
run_fuzz() {
  local minutes=$1 targets names found=$root/target/fuzz/found broken=$root/target/fuzz/broken
  local coverage=(-Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4 -Cllvm-args=-sanitizer-coverage-inline-8bit-counters
    -Cllvm-args=-sanitizer-coverage-pc-table -Cllvm-args=-sanitizer-coverage-trace-compares)
  targets=${2:-$(cd "$root/tests/fuzz/corpus" && ls | grep -v '^plugin_')}
  names=($targets)
  # With --target the flags stay away from build scripts and macros.
  RUSTFLAGS="${coverage[*]}" cargo build --release --locked --target x86_64-unknown-linux-gnu --target-dir "$root/target/fuzz" \
    --manifest-path "$root/tests/fuzz/libfuzzer/Cargo.toml"
  for name in "${names[@]}"; do
    say "fuzzing $name"
    mkdir -p "$found/$name" "$broken"
    FUZZ_TARGET=$name "$root/target/fuzz/x86_64-unknown-linux-gnu/release/penstock-libfuzzer" -max_total_time=$((minutes * 60 / ${#names[@]})) \
      -max_len=4096 -timeout=10 -rss_limit_mb=2048 -print_final_stats=0 -verbosity=0 -artifact_prefix="$broken/$name-" \
      "$found/$name" "$root/tests/fuzz/corpus/$name"
  done
}
