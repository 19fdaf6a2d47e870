# Needs make and Python 3.10 to 3.13. `make PYTHON=/path/to/python demo` picks another interpreter.
SHELL := /bin/bash
.DEFAULT_GOAL := help
.PHONY: help setup demo test test-slow test-gcp bench format clean

BIN := .venv/bin
READY := .venv/ready
CANDIDATES := $(or $(PYTHON),python3.11 python3 python3.12 python3.13 python3.10)
SUITABLE := import sys, ensurepip, venv; sys.exit(not (3, 10) <= sys.version_info < (3, 14))

help: ## list these targets
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' Makefile | expand -t 12

setup: $(READY) ## install everything into .venv (the other targets do it when needed)

demo: $(READY) ## train on the embedded MNIST digits with two workers
	@$(BIN)/raytrain run examples/mnist_torch.yaml --set scaling.workers=2 --name "demo-$$(date +%Y%m%d-%H%M%S)"
	@echo "Every demo is a run of its own; delete its folder under runs/ when you are done with it."

test: $(READY) ## lint, format, types, and all tests but the slow ones
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/pytest -n 2 tests/unit
	$(BIN)/pytest tests/integration

test-slow: $(READY) ## the tests that take longer than about 20 s
	$(BIN)/pytest -m slow

test-gcp: $(READY) ## `ray up` of cluster.yaml on an emulated Google Cloud; needs root on Linux
	$(BIN)/pytest -m slow tests/integration/gcp

bench: $(READY) ## run all benchmarks and write benchmarks.md; takes about half an hour
	$(BIN)/raytrain bench page > benchmarks.md

format: $(READY) ## let ruff fix and format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean: ## remove .venv, caches and build outputs; runs/ is kept
	rm -rf .venv build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find raytrain_app tests examples -name __pycache__ -type d -prune -exec rm -rf {} +

# Rebuilt from nothing whenever the requirements change, so that it never holds more or less than they say.
$(READY): pyproject.toml constraints.txt
	@python=; for candidate in $(CANDIDATES); do \
	    if $$candidate -c '$(SUITABLE)' 2>/dev/null; then python=$$candidate; break; fi; \
	done; \
	if [ -z "$$python" ]; then \
	    echo "None of these is a Python 3.10 to 3.13 with venv: $(CANDIDATES)." >&2; \
	    echo "Install one (on Debian: apt-get install python3 python3-venv) or name it: make PYTHON=/path/to/python" >&2; \
	    exit 2; \
	fi; \
	echo "Setting up .venv with $$($$python --version); this takes a minute or two, once."; \
	$$python -m venv --clear .venv && \
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]' && \
	touch $(READY)
