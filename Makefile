# One command each: make trial (see a trial), make test (the whole default suite), make check (what CI runs).
#   TORCH=cpu   the pinned CPU build (on Linux, outside this project's own machines, name PyTorch's CPU index: see README)
#   TORCH=cuda  the same release as the package index has it
#   TORCH=keep  the torch of the Python you call make with

PYTHON ?= python3
TORCH ?= cpu
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
SOURCES := src tests benchmarks scripts
# Samples that tests read where they are; those of Debian are tested where they have been fetched.
TESTED := pruning vader minilm mmlu-dev

.PHONY: trial setup test test-slow check format lint types docs bench clean

trial: $(VENV)/lm.done
	$(BIN)/fairtrial samples get pruning
	$(BIN)/fairtrial run pruning

setup: $(VENV)/all.done

test: $(VENV)/all.done
	$(BIN)/fairtrial samples get $(TESTED)
	$(BIN)/python -m pytest

test-slow: $(VENV)/all.done
	$(BIN)/fairtrial samples get $(TESTED)
	$(BIN)/python -m pytest -m "slow and not gpu" --timeout=1800

# The tests build the documentation too, strictly.
check: lint types test

format: $(VENV)/all.done
	$(BIN)/ruff format $(SOURCES)
	$(BIN)/ruff check --fix $(SOURCES)

lint: $(VENV)/all.done
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/ruff check $(SOURCES)

types: $(VENV)/all.done
	$(BIN)/mypy

docs: $(VENV)/all.done
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

bench: $(VENV)/all.done
	$(BIN)/python benchmarks/run.py

clean:
	rm -rf $(VENV) site dist .pytest_cache .mypy_cache .ruff_cache

ifeq ($(TORCH),keep)
VENV_FLAGS := --system-site-packages
CONSTRAINTS := $(VENV)/constraints.txt
else
CONSTRAINTS := constraints.txt
endif

$(VENV)/bin/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Fairtrial needs Python 3.11 or newer; name one with PYTHON=")'
	$(PYTHON) -m venv $(VENV_FLAGS) $(VENV)

# With TORCH=keep the pin of torch is dropped, so that the release that is there stays.
$(VENV)/constraints.txt: constraints.txt | $(VENV)/bin/python
	grep -v '^torch==' $< > $@

$(VENV)/lm.done: pyproject.toml $(CONSTRAINTS) | $(VENV)/bin/python
	$(PIP) install --quiet -c $(CONSTRAINTS) -e '.[lm]'
	touch $@

$(VENV)/all.done: pyproject.toml $(CONSTRAINTS) | $(VENV)/bin/python
	$(PIP) install --quiet -c $(CONSTRAINTS) -e '.[all,dev]'
	touch $@ $(VENV)/lm.done
