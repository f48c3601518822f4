# Everything lives in .venv at the project's root; `rm -rf .venv` undoes it all.

PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-warn-script-location

# TensorFlow's notes on the processor it found are not ours to repeat.
export TF_CPP_MIN_LOG_LEVEL ?= 2

.PHONY: train test test-all lint bench hosts horovod clean

train: .venv/installed
	@$(BIN)/dapple train models/gpt.py:gpt --stages 2 --micro-batches 8 --batch-size 64 --steps 100 \
	    --compare 10 --trace out/gpt-timeline.png

test: lint .venv/installed-horovod
	@HYPOTHESIS_PROFILE=ci $(BIN)/python -m pytest -q -m "not slow"

test-all: lint .venv/installed-horovod
	@HYPOTHESIS_PROFILE=thorough $(BIN)/python -m pytest -q

lint: .venv/installed-test
	@$(BIN)/ruff check --quiet
	@$(BIN)/ruff format --check --quiet
	@$(BIN)/mypy --no-error-summary
	@$(BIN)/lint-imports --no-logo

bench: .venv/installed-test
	@$(BIN)/python -m benchmarks

# Jobs on emulated hosts with slow links: needs root and iproute2.
hosts: .venv/installed-test .venv/installed-horovod
	@$(BIN)/python -m benchmarks hosts

horovod: .venv/installed-horovod

clean:
	rm -rf build dist out *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache

# A stamp is older than what it was made from if the needs have changed since; otherwise nothing is installed.
.venv/installed: setup.py pyproject.toml | $(BIN)/python
	@echo "Installing dapple_tf into .venv (TensorFlow is large: the first time takes a few minutes) ..." >&2
	@$(PIP) --editable .
	@touch $@

.venv/installed-test: .venv/installed
	@echo "Installing what the tests need into .venv ..." >&2
	@$(PIP) --editable ".[test]"
	@touch $@

.venv/installed-horovod: .venv/installed scripts/install_horovod.sh
	@scripts/install_horovod.sh $(BIN)/python
	@touch $@

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))' || { \
	    echo "dapple_tf needs Python 3.10 to 3.13, and $(PYTHON) is not: choose one with make PYTHON=python3.12" >&2; \
	    exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	    echo "$(PYTHON) cannot make virtual environments: apt install python3-venv, then try again" >&2; \
	    exit 1; }
	@$(PYTHON) -m venv .venv
