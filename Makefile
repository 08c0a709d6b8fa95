# Every target makes its own set-up: Python 3.11 with venv, gcc, git and a package index are enough.

PYTHON ?= python3.11
BIN := .venv/bin
MODEL := .cache/models/smollm2-135m-instruct
# A hang dumps every stack. pytest-timeout ends a test that is slow; the second pair is for one that
# holds the interpreter lock, where pytest-timeout's thread cannot run.
PYTEST := $(BIN)/pytest --import-mode=importlib --durations=40 --durations-min=5 \
	-o faulthandler_timeout=900 -o faulthandler_exit_on_timeout=true

.DEFAULT_GOAL := help
.PHONY: help setup fabric ucxx model demo demo-pd test test-fast check format clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: ## make .venv with the pinned packages (once)
	@PYTHON=$(PYTHON) scripts/setup.sh

fabric: ## make .venv-fabric, in which tests run NIXL's LIBFABRIC backend (once)
	@PYTHON=$(PYTHON) scripts/setup_fabric.sh

ucxx: ## make .venv-ucxx, UCX alone, which the benchmarks compare NIXL with (once)
	@PYTHON=$(PYTHON) scripts/setup_ucxx.sh

model: setup ## make the demo's model (once)
	@$(BIN)/python scripts/make_model.py --out $(MODEL)

demo: model ## serve a model, offload its KV cache, get it back from memory and from disk
	@$(BIN)/pdoffload demo $(MODEL) --work-dir .cache/demo

demo-pd: model ## serve a model twice: a decoder takes its KV cache from a prefiller
	@$(BIN)/pdoffload demo-pd $(MODEL) --work-dir .cache/demo

test: model ## every test, those with a real vLLM included
	@$(BIN)/python scripts/fetch_vllm_033.py || true
	@PYTHON=$(PYTHON) scripts/setup_fabric.sh || true
	@PYTHON=$(PYTHON) scripts/setup_ucxx.sh || true
	@scripts/get_azurite.sh || true
	$(PYTEST)

test-fast: setup ## the tests that need neither vLLM nor minutes
	$(PYTEST) -m "not vllm and not slow"

check: setup ## format, lint, types, layers
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(PYTEST) -q tests/test_layers.py

format: setup ## write the format
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean: ## remove everything that the targets above made
	rm -rf .venv .venv-fabric .venv-ucxx .cache dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -path ./.git -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +
