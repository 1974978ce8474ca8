# Two commands do everything: `make serve` and `make test`. Both install what is missing and say so.
#
#   make serve [LISTEN=127.0.0.1:8080] [ARGS="--model DIR --workers 2"]
#   make test
#
# The rest are the parts of `make test`, to be run alone while working.

LISTEN ?= 127.0.0.1:8080
ARGS ?=
E2E_ARGS ?=
EXAMPLES ?= 100
MINUTES ?= 10
ROUNDS ?= 10
TARGET ?=
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.PHONY: kernels kernels-verify fuzz properties help serve test format lint unit doc e2e typed packages package test-packages test-clients test-stores test-shared test-faults test-wasm test-admin wasm-plugin tools

TOOLS := . .ci/tools.sh

help: ## Lists the targets
	@sed -n 's/^\([a-z0-9-]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 16

serve: ## Builds penstock, starts it, prints the URL and a curl to paste
	@$(TOOLS); need_build_tools
	@$(TOOLS); say "building penstock (a first build takes some minutes)"; cargo build --profile serve --locked -p penstock
	@$(TOOLS); exec "$$(built serve)" serve --listen "$(LISTEN)" $(ARGS)

test: format lint unit doc kernels-verify e2e typed packages ## Everything that CI runs
	@echo "make: all tests passed"

tools: ## Installs what the build and the tests need
	@$(TOOLS); need_build_tools; need_test_tools

format: ## Formatting of Rust and Python
	@$(TOOLS); need_rust; cargo fmt --all -- --check
	@$(TOOLS); need_test_tools; ruff format --diff --quiet .; ruff check --quiet .

lint: ## Clippy without warnings, and a current lock file of the fuzzer, which is a workspace of its own
	@$(TOOLS); need_build_tools; cargo clippy --workspace --all-targets --locked --no-deps -- -D warnings
	@cargo metadata --locked --format-version 1 --filter-platform x86_64-unknown-linux-gnu --manifest-path tests/fuzz/libfuzzer/Cargo.toml > /dev/null

unit: ## Unit, property and simulation tests, and the house rules
	@$(TOOLS); need_build_tools; need_stores; run_unit_tests

doc: ## The documentation builds without warnings, and the programs without what only tests ask of their crates
	@$(TOOLS); need_build_tools; cargo check --workspace --bins --locked --quiet; RUSTDOCFLAGS="-D warnings" cargo doc --workspace --no-deps --locked --quiet

e2e: ## The real binary, driven by the official SDKs
	@$(TOOLS); need_build_tools; need_test_tools; need_stores; build_program penstock; run_e2e_tests $(E2E_ARGS)

typed: ## Typed answers of our own pool by instructor, LangChain, pydantic-ai and others (a part of test-clients)
	@$(TOOLS); need_build_tools; need_client_tools; build_program penstock; run_client_tests -k pool

packages: ## Chart, unit, alert rules, Dockerfile, bill of materials: what needs no file system of its own (a part of test-packages)
	@$(TOOLS); need_build_tools; need_package_tools; build_program penstock; run_package_tests -m "not slow"

test-packages: ## Packages, made and installed: .deb and tarball in a fresh Debian, the image alone (root; minutes)
	@$(TOOLS); need_build_tools; need_package_tools; need_root_tools; build_program penstock; run_package_tests

package: ## Makes dist/: .deb, tarball, image, bill of materials, licences, checksums, with WebAssembly
	@$(TOOLS); need_build_tools; cargo build --release --locked -p penstock --features wasm
	@$(TOOLS); packaging/build.sh "$$(built release)" dist; packaging/image.py "$$(built release)" dist

test-stores: ## The store's tests against real PostgreSQL and Redis servers alone (`unit` runs them too)
	@$(TOOLS); need_build_tools; need_stores; cargo test -p penstock-store --locked --features postgres,redis --test servers

test-shared: ## One budget of two gateways on real PostgreSQL and Redis, with 1,000 streams (`e2e` takes 200)
	@$(TOOLS); need_build_tools; need_test_tools; need_stores; build_program penstock; PENSTOCK_STREAMS=1000 run_e2e_tests -k test_shared_budget $(E2E_ARGS)

test-faults: ## Every cell of the fault matrices, a pulled cable, a storm of a hundred faults (`unit` runs a choice of them)
	@$(TOOLS); need_build_tools; PENSTOCK_FAULTS=full cargo test -p penstock-fleet-tests --locked --test all -- --nocapture matrix:: apart:: network:: storm::

test-wasm: ## Plugins that are WebAssembly, with the feature that hosts them
	@$(TOOLS); need_build_tools; need_test_tools; run_wasm_tests

fuzz: ## Searches every fuzz target with libFuzzer, guided by coverage: MINUTES=10 in all, TARGET=name for one alone
	@$(TOOLS); need_build_tools; run_fuzz "$(MINUTES)" $(TARGET)

properties: ## Every property test with new random cases: ROUNDS=10 times (`unit` draws the same cases in every run)
	@$(TOOLS); need_build_tools; need_stores; run_properties "$(ROUNDS)"

wasm-plugin: ## Builds the plugin of the WebAssembly tests from its source (npm) and notes their checksums
	@npm ci --silent --no-audit --no-fund --prefix plugins/wasm/tests/sdk && npm run --silent --prefix plugins/wasm/tests/sdk build
	@cd plugins/wasm/tests/sdk && sha256sum assembly/index.ts package-lock.json plugin.wasm > SHA256SUMS

kernels: ## Compiles the CUDA kernels into kernels/cuda/prebuilt (NVRTC from PyPI, 90 MB; no toolkit, no GPU)
	@$(TOOLS); need_build_tools; need_nvrtc; build_program kernelc; run_kernelc build

kernels-verify: ## Compiles the CUDA kernels and compares the bytes with what is committed
	@$(TOOLS); need_build_tools; need_nvrtc; build_program kernelc; run_kernelc verify

test-admin: ## The admin API against its own document, deeper: EXAMPLES=100
	@$(TOOLS); need_build_tools; need_test_tools; build_program penstock; PENSTOCK_ADMIN_EXAMPLES="$(EXAMPLES)" run_e2e_tests -k test_admin $(E2E_ARGS)

test-clients: ## LangChain, LlamaIndex, LiteLLM, pydantic-ai and others against the real binary and mocks of providers (`typed` runs the pool's part)
	@$(TOOLS); need_build_tools; need_client_tools; build_program penstock; run_client_tests $(E2E_ARGS)
