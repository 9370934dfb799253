# Two commands: `make serve` and `make test`. Each sets up .venv from nothing. `make help` lists the others.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -P -m pip install --quiet --disable-pip-version-check
# The torch release the suite is run with. Installed first, so that nothing after it replaces it.
TORCH ?= torch==2.13.0
# For a GPU machine without a network: what its own Python may lack beside torch, triton and transformers.
GPU_PYTHON_VERSION ?= 3.12
WHEELS := wheels
GPU_PACKAGES := msgspec pyzmq psutil prometheus-client safetensors tokenizers huggingface-hub tqdm pyyaml \
	hypothesis sortedcontainers attrs pytest iniconfig pluggy packaging pygments jinja2 markupsafe
HOST ?= 127.0.0.1
PORT ?= 8000
MODEL ?=
ARGS ?=

# Two processes, each with whole files: fixtures that start a server are for one file. In the order of tests/conftest.py.
# The suite starts hundreds of Python processes: without cached bytecode each would compile the package again.
PYTEST := PYTHONDONTWRITEBYTECODE= $(BIN)/pytest
IN_PARALLEL := -n 2 --dist loadfile --no-loadscope-reorder --durations=10

.DEFAULT_GOAL := help
.PHONY: help serve test test-rest test-full test-slow test-browser simulate acceptance lint install install-dev gpu-wheels gpu-check clean

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1|/p' Makefile | while IFS='|' read -r name text; do \
		printf '  make %-13s %s\n' "$$name" "$$text"; done

# Developing needs transformers as the reference, and Triton's interpreter and compiler.
install: $(VENV)/.installed ## set up .venv with what serving needs

install-dev: $(VENV)/.installed-dev ## set up .venv with what the tests and linters need as well

$(VENV)/.installed: pyproject.toml quire/version.py
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) "$(TORCH)"
	$(PIP) -e ".[bench]"
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(PIP) -e ".[bench,dev]"
	touch $@

serve: install ## serve the demo model, or MODEL=/path/to/checkpoint, on HOST and PORT; ARGS="..." are further flags
	$(BIN)/quire serve $(MODEL) --host $(HOST) --port $(PORT) $(ARGS)

test: install-dev lint ## lint, check types, and run the best test of each behaviour (under 3 minutes on two cores)
	$(PYTEST) $(IN_PARALLEL)

test-rest: install-dev ## run what test-full has and test has not
	$(PYTEST) $(IN_PARALLEL) -m "full and not slow and not gpu"

test-full: install-dev lint ## run everything that continuous integration runs, in one go
	$(PYTEST) $(IN_PARALLEL) -m "not slow and not gpu"

test-slow: install-dev ## run the tests that take minutes each
	$(PYTEST) -m slow

# The engine under seeded faults, in one process: tests/simulation/README.md. ARGS="--first SEED --seeds N --seconds S".
simulate: install-dev ## run the engine under seeded faults; ARGS="--seeds N"
	$(BIN)/python tests/simulation/run.py --jobs 2 $(ARGS)

# tests/acceptance/README.md has the harnesses and their flags.
acceptance: install-dev ## try a real server under faults and load; ARGS="faults --count 50"
	$(BIN)/python -P tests/acceptance/run.py $(ARGS)

# The page of `quire replay --html` in a real browser: Debian's chromium, unless there is one already.
test-browser: install-dev ## try the report of a replay in a real browser
	command -v chromium || command -v google-chrome || { \
		sudo=$$(test "$$(id -u)" = 0 || command -v sudo); \
		$$sudo apt-get update -q && $$sudo apt-get install -q -y --no-install-recommends chromium fonts-dejavu-core; }
	$(PYTEST) -m slow tests/launch/replay/test_html_browser.py

lint: install-dev ## run ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Beforehand, with a network: wheels for the other machine's Python. The folder hides itself from git.
gpu-wheels: ## download wheels for a GPU machine without a network
	mkdir -p $(WHEELS)
	rm -f $(WHEELS)/*.whl
	echo '*' > $(WHEELS)/.gitignore
	$(PYTHON) -P -m pip download --quiet --disable-pip-version-check --only-binary=:all: --no-deps \
		--implementation cp --python-version $(GPU_PYTHON_VERSION) $(foreach n,34 31 28 27 24 17,--platform manylinux_2_$(n)_x86_64) \
		--platform manylinux2014_x86_64 --dest $(WHEELS) $(GPU_PACKAGES)

# There: by its own Python (PYTHON=...), which has torch and triton. ARGS="--quick", or OUT=FOLDER for the JSON.
gpu-check: ## check the GPU path on such a machine
	$(PYTHON) -P tests/gpu/check.py --wheels $(WHEELS) $(if $(OUT),--out "$(OUT)") $(ARGS)

clean: ## remove .venv and caches
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
