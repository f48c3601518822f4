# Everything is installed into .venv at the project's root; `rm -rf .venv` removes it.

PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-warn-script-location

# Which TensorFlow is installed: that for the cpu or, with `make EXTRA=gpu`, that for NVIDIA GPUs. .venv/extra keeps the
# choice for later calls.
EXTRA ?= $(or $(shell cat .venv/extra 2>/dev/null),cpu)
ifeq ($(filter cpu gpu,$(EXTRA)),)
$(error EXTRA is $(EXTRA): it must be cpu or gpu)
endif

# The version with which the tests run and the published figures were measured. setup.py allows others: see `make
# matrix`.
TENSORFLOW := $(if $(filter gpu,$(EXTRA)),tensorflow[and-cuda],tensorflow-cpu)==2.21.*

# The number of processes that run tests. Three suit two cores, because one of them runs all tests that start jobs (see
# tests/durations.py), and often waits.
WORKERS ?= 3
PYTEST := $(BIN)/python -m pytest -q -n $(WORKERS)

# Hide TensorFlow's log lines about the processor.
export TF_CPP_MIN_LOG_LEVEL ?= 2

# Keep compiled bytecode, even if the caller's environment turns that off: the tests start many Python processes.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: train test test-all lint bench papers docs hosts matrix release horovod clean

train: .venv/installed
	@mkdir -p out
	@$(BIN)/dapple train models/gpt.py:gpt --stages 2 --micro-batches 8 --batch-size 64 --steps 100 \
	    --baseline 10 --trace out/gpt-timeline.png

# Run a command and the linters at the same time. The linters' output is printed after that of the command. Fail if one
# of them fails.
define and_lint
log=$$(mktemp); trap 'rm -f "$$log"' EXIT; \
$(MAKE) --no-print-directory lint >"$$log" 2>&1 & lint=$$!; \
$(1); tests=$$?; \
wait $$lint; linters=$$?; \
cat "$$log"; \
exit $$((tests ? tests : linters))
endef

# The time limit of a test cannot stop it while it hangs in native code. After 600 s faulthandler then prints where the
# threads are, and ends the process.
HANG := -o faulthandler_timeout=600 -o faulthandler_exit_on_timeout=true

test: .venv/installed-test .venv/installed-exchange
	@$(call and_lint,HYPOTHESIS_PROFILE=ci $(PYTEST) -m "not slow" $(HANG))

test-all: .venv/installed-test .venv/installed-exchange
	@$(call and_lint,HYPOTHESIS_PROFILE=dev $(PYTEST) -o timeout=1200)

lint: .venv/installed-test
	@$(BIN)/ruff check --quiet
	@$(BIN)/ruff format --check --quiet
	@$(BIN)/mypy --no-error-summary
	@$(BIN)/lint-imports --no-logo

bench: .venv/installed-test
	@$(BIN)/python -m benchmarks

# Write docs/papers.md: the papers' tables and figures beside ours. It takes five minutes of CPU time, and eight more
# the first time.
papers: .venv/installed-test
	@$(BIN)/python -m benchmarks.papers

# Build the site from docs/; with --strict a warning is an error. The variable hides an advertisement of the theme for
# its successor.
docs: .venv/installed-docs
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet --strict
	@echo "out/site/index.html"

# Measure jobs on emulated hosts with slow links: needs root and iproute2.
hosts: .venv/installed-test .venv/installed-exchange
	@$(BIN)/python -m benchmarks hosts

# Test with other versions of TensorFlow, Keras and NumPy, each in an environment of its own.
matrix:
	@scripts/matrix.sh

# Build the wheel and the source distribution in dist/, and try the wheel in an environment of its own.
release: .venv/installed-test
	@scripts/release.sh

horovod: .venv/installed-exchange

clean:
	rm -rf build dist out *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache

# The files .venv/installed* are empty: their times say when something was installed. Each depends on the files that
# name its requirements, so nothing is installed again unless one of them has changed.
.venv/installed: setup.py pyproject.toml $(wildcard dapple_tf/simulator/native/*.*) .venv/extra | $(BIN)/python
	@echo "Installing dapple_tf into .venv (TensorFlow is large: the first time takes a few minutes) ..." >&2
	@$(PIP) --editable ".[$(EXTRA)]" "$(TENSORFLOW)"
	@touch $@

# When the choice changes, the other TensorFlow is uninstalled first, since both install the same files. The recipe
# always runs (FORCE), but writes .venv/extra only if the choice has changed, so that nothing else is installed again.
.venv/extra: FORCE | $(BIN)/python
	@if [ "$$(cat $@ 2>/dev/null)" != "$(EXTRA)" ]; then \
	    if $(BIN)/python -m pip show --quiet $(if $(filter gpu,$(EXTRA)),tensorflow-cpu,tensorflow) 2>/dev/null; then \
	        $(BIN)/python -m pip uninstall --quiet --quiet --yes tensorflow tensorflow-cpu; \
	    fi; \
	    echo "$(EXTRA)" >$@; \
	fi

FORCE:

.venv/installed-test: .venv/installed
	@echo "Installing the requirements of the tests into .venv ..." >&2
	@$(PIP) --editable ".[$(EXTRA),test]" "$(TENSORFLOW)"
	@touch $@

.venv/installed-docs: .venv/installed
	@echo "Installing what the site needs into .venv ..." >&2
	@$(PIP) --editable ".[$(EXTRA),docs]" "$(TENSORFLOW)"
	@touch $@

.venv/installed-horovod: .venv/installed dapple_tf/distributed/horovod/install.sh
	@bash dapple_tf/distributed/horovod/install.sh $(BIN)/python
	@touch $@

# The TensorFlow ops by which ranks exchange tensors. They are optional: without a compiler the script says so and
# succeeds.
.venv/installed-exchange: .venv/installed-horovod scripts/build_exchange.sh $(wildcard dapple_tf/distributed/native/*.*)
	@scripts/build_exchange.sh $(BIN)/python
	@touch $@

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))' || { \
	    echo "dapple_tf needs Python 3.10 to 3.13, and $(PYTHON) is another version: try make PYTHON=python3.12" >&2; \
	    exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	    echo "$(PYTHON) cannot make virtual environments: apt install python3-venv, then try again" >&2; \
	    exit 1; }
	@$(PYTHON) -m venv .venv
