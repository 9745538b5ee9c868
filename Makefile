# The commands of a checkout. PYTHON=/path/to/python3.12 chooses the interpreter of .venv;
# ARGS="-k commit" goes to pytest, and to the demo.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
MAKEFLAGS += --no-builtin-rules
PYTHON ?= python3
export PYTHON
ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help setup test demo lint bench clean

help: ## list the commands
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/make \1	\2/p' $(MAKEFILE_LIST)

setup: ## install what is missing, build, install; quick when nothing changed
	@tools/setup

test: setup ## run the tests
	@status=0; .venv/bin/pytest $(ARGS) || status=$$?; \
	  echo "make test: $$SECONDS s without setup"; exit $$status

demo: setup ## pack the tiny checkpoint, serve it, stream a completion
	@PATH="$(CURDIR)/.venv/bin:$$PATH" examples/demo.sh $(ARGS)

lint: setup ## hold the tree to the house style; tools/check --fix repairs
	@tools/check

bench: setup ## run the benchmarks of the ops
	@for bench in tests/bench/bench_*.py; do \
	  echo "== $$bench"; PYTHONPATH=tests .venv/bin/python "$$bench" $(ARGS); done

clean: ## remove what was built and installed, .venv too
	rm -rf build demo dist .venv sdk/deltaflash .mypy_cache .pytest_cache .ruff_cache .import_linter_cache
