# Two commands: `make serve` and `make test`. Each sets up .venv from nothing.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -P -m pip install --quiet --disable-pip-version-check
# The torch release the suite is run with. Installed first, so that nothing after it replaces it.
TORCH ?= torch==2.13.0
HOST ?= 127.0.0.1
PORT ?= 8000
MODEL ?=
ARGS ?=

.PHONY: serve test test-slow lint install install-dev clean

# What serving needs; developing needs more (transformers as the reference, Triton's interpreter and compiler).
install: $(VENV)/.installed

install-dev: $(VENV)/.installed-dev

$(VENV)/.installed: pyproject.toml quire/version.py
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) "$(TORCH)"
	$(PIP) -e ".[bench]"
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(PIP) -e ".[bench,dev]"
	touch $@

serve: install
	$(BIN)/quire serve $(MODEL) --host $(HOST) --port $(PORT) $(ARGS)

test: install-dev lint
	$(BIN)/pytest

test-slow: install-dev
	$(BIN)/pytest -m slow

lint: install-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
