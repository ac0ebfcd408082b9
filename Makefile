# Everything happens in the checkout: the virtual environment .venv, Cargo's target/, runs/.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# torch loads MKL's or OpenBLAS's threads; tests compare bits, so they use one.
TEST_ENV := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1
RUST_SOURCES := $(shell find rust -name '*.rs' -not -path '*/target/*') Cargo.toml Cargo.lock $(wildcard rust/*/Cargo.toml)

.PHONY: help
help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

.PHONY: tools
tools:
	@command -v $(PYTHON) >/dev/null || { echo "error: $(PYTHON) is not installed"; \
	  echo "hint: install Python 3.11 or newer, or name one: make PYTHON=/path/to/python3.11 ..."; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "error: $(PYTHON) is $$($(PYTHON) -V 2>&1), but pipeloom needs Python 3.11 or newer"; \
	  echo "hint: name a newer one: make PYTHON=/path/to/python3.11 ..."; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { \
	  echo "error: $(PYTHON) can't make virtual environments"; \
	  echo "hint: install its venv package (Debian: apt-get install python3-venv)"; exit 1; }
	@command -v cargo >/dev/null || { echo "error: cargo, Rust's build tool, is not installed"; \
	  echo "hint: install a Rust toolchain of 1.90 or newer from https://rustup.rs"; exit 1; }
	@command -v cc >/dev/null || { echo "error: cc, a C compiler, is not installed (Rust links with it)"; \
	  echo "hint: install one (Debian: apt-get install gcc)"; exit 1; }

$(BIN)/pip: | tools
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade "pip>=25.1"

# Installed from the lock-free ranges of pyproject.toml; rebuilt when a Rust source changes.
$(VENV)/train.stamp: pyproject.toml $(RUST_SOURCES) | $(BIN)/pip
	$(BIN)/pip install --quiet --editable '.[train]'
	@touch $@

$(VENV)/dev.stamp: pyproject.toml $(RUST_SOURCES) | $(BIN)/pip
	$(BIN)/pip install --quiet --group dev --editable '.[train,testing]'
	@touch $@

.PHONY: train
train: $(VENV)/train.stamp ## build, then train a pipeline-parallel GPT on real text
	$(BIN)/pipeloom train $(ARGS)

.PHONY: dev
dev: $(VENV)/dev.stamp ## build and install all that development needs

.PHONY: test
test: dev ## all tests: Rust, then Python (ARGS="-k name" narrows the latter)
	cargo test --quiet --workspace
	$(TEST_ENV) $(BIN)/python -m pytest -q -n 2 $(ARGS)

.PHONY: test-deep
test-deep: dev ## whole grids and long property tests (an hour)
	PROPTEST_CASES=20000 cargo test --quiet --release
	cargo test --quiet --release -p pipeloom-core --test families -- --ignored
	cargo test --quiet --release -p pipeloom-core --lib -- --ignored a_million
	PIPELOOM_CASES=1000000 cargo test --quiet --release -p pipeloom-core --test soak
	$(TEST_ENV) PIPELOOM_HYPOTHESIS_PROFILE=deep $(BIN)/python -m pytest -q -n 2 --timeout 7200 -m "not gpu" $(ARGS)

.PHONY: fuzz
fuzz: ## feed each fuzz target bytes for a minute (needs `cargo install cargo-fuzz`; ARGS="--jobs 2")
	for target in csv check lower simulate; do \
	  RUSTC_BOOTSTRAP=1 cargo fuzz run --fuzz-dir rust/fuzz $(ARGS) $$target -- -max_total_time=60; done

.PHONY: bench
bench: dev ## benchmarks beside their peers in one run (ARGS="--json FILE")
	$(BIN)/pip install --quiet --group bench
	$(BIN)/python benches/run.py $(ARGS)

.PHONY: fmt
fmt: dev ## format Rust and Python
	cargo fmt --all
	$(BIN)/ruff format python tests benches examples
	$(BIN)/ruff check --fix --quiet python tests benches examples

.PHONY: lint
lint: dev ## formatting, clippy, ruff, types, the stub
	cargo fmt --all --check
	cargo clippy --quiet --workspace --all-targets -- -D warnings
	$(BIN)/ruff format --check --quiet python tests benches examples
	$(BIN)/ruff check --quiet python tests benches examples
	$(BIN)/mypy
	cd python && ../$(BIN)/python -m mypy.stubtest pipeloom._core

.PHONY: all
all: lint test ## lint, then test

.PHONY: clean
clean: ## remove what was built (not runs/)
	rm -rf target $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis
