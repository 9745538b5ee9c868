# The commands of a checkout. PYTHON=/path/to/python3.12 chooses the interpreter of .venv; CUDA=1
# builds the CUDA backend too. ARGS="-k commit" goes to pytest, ARGS="It was" is the demo's prompt.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
MAKEFLAGS += --no-builtin-rules
PYTHON ?= python3
export PYTHON CUDA
ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help setup test demo lint bench clean

help: ## list the commands
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/make \1	\2/p' $(MAKEFILE_LIST)

setup: ## install what is missing, build, install; quick when nothing changed; CUDA=1 for GPUs
	@tools/setup

test: setup ## run the tests
	@status=0; .venv/bin/pytest $(ARGS) || status=$$?; \
	  echo "make test: $$SECONDS s without setup"; exit $$status

demo: setup ## pack the tiny checkpoint, serve it, stream a completion
	@PATH="$(CURDIR)/.venv/bin:$$PATH" examples/demo.sh $${ARGS:+"$$ARGS"}

lint: setup ## hold the tree to the house style; tools/check --fix repairs
	@tools/check

bench: setup ## run the benchmarks; they need a GPU and torch
	@for bench in tests/bench/bench_*.py; do \
	  echo "== $$bench"; PYTHONPATH=tests .venv/bin/python "$$bench" $(ARGS); done

clean: ## remove what was built and installed, .venv too
	rm -rf build demo dist .venv sdk/deltaflash .mypy_cache .pytest_cache .ruff_cache .import_linter_cache
