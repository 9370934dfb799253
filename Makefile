# The main targets are `make serve` and `make test`; both create .venv if it is missing. `make help` lists all targets.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -P -m pip install --quiet --progress-bar off --disable-pip-version-check
# pip and venv may be silent for minutes: this prints a line per step, and one every four seconds.
STEP := @sh tools/step.sh $(VENV)/pip.log
# The torch release that the tests use. It is installed first, so that no later requirement replaces it.
TORCH ?= torch==2.13.0
# Wheels for a GPU machine without a network whose Python has torch, triton and transformers, but may lack these.
GPU_PYTHON_VERSION ?= 3.12
WHEELS := wheels
GPU_PACKAGES := msgspec pyzmq psutil prometheus-client safetensors tokenizers huggingface-hub tqdm pyyaml \
	hypothesis sortedcontainers attrs pytest iniconfig pluggy packaging pygments jinja2 markupsafe xxhash google-re2
HOST ?= 127.0.0.1
PORT ?= 8000
MODEL ?=
ARGS ?=

# Two test processes, each of which runs whole files, because a fixture that starts a server belongs to one file.
# tests/conftest.py defines the order. The suite starts hundreds of Python processes; without cached bytecode each of
# them would compile the package. A process that crashes is not replaced, because pytest-xdist then may wait for ever.
PYTEST := PYTHONDONTWRITEBYTECODE= $(BIN)/pytest
IN_PARALLEL := -n 2 --dist loadfile --no-loadscope-reorder --max-worker-restart 0 --durations=10 --cpu-seconds=.pytest_cache/cpu_seconds.json

.DEFAULT_GOAL := help
.PHONY: help serve test test-rest test-full test-slow test-browser test-clients simulate acceptance nightly lint install install-dev docs gpu-wheels gpu-check clean

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1|/p' Makefile | while IFS='|' read -r name text; do \
		printf '  make %-13s %s\n' "$$name" "$$text"; done

# Development needs transformers as the reference, and Triton's interpreter and compiler.
install: $(VENV)/.installed ## create .venv with the packages for serving

install-dev: $(VENV)/.installed-dev ## create .venv with the packages for serving, tests and linters

$(VENV)/.installed: pyproject.toml quire/version.py
	@test -x $(BIN)/python || sh tools/step.sh $(VENV)/pip.log "Creating $(VENV)" $(PYTHON) -m venv $(VENV)
	$(STEP) "Installing $(TORCH) into $(VENV): several hundred MB, minutes on a slow network" $(PIP) "$(TORCH)"
	$(STEP) "Installing Quire and what it needs into $(VENV)" $(PIP) -e ".[bench,vision]"
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(STEP) "Installing linters and what the tests need into $(VENV)" $(PIP) -e ".[bench,dev]"
	@touch $@

serve: install ## serve the demo model, or MODEL=/path/to/checkpoint, on HOST and PORT; ARGS="..." adds flags
	@$(BIN)/quire serve $(MODEL) --host $(HOST) --port $(PORT) $(ARGS) || { \
		status=$$?; test $$status != 78 || echo "make: set another address or model with HOST=, PORT= and MODEL=," \
		"for example: make serve PORT=8001" >&2; exit $$status; }

test: install-dev lint ## lint, check types, and run the default tests (about 5 minutes on two idle cores)
	$(PYTEST) $(IN_PARALLEL)

test-rest: install-dev ## run the tests of test-full that test leaves out
	$(PYTEST) $(IN_PARALLEL) -m "full and not slow and not gpu"

test-full: install-dev lint ## lint, check types, and run all tests of continuous integration
	$(PYTEST) $(IN_PARALLEL) -m "not slow and not gpu"

test-slow: install-dev ## run the slow tests (minutes each)
	$(PYTEST) -m slow

# tests/simulation/README.md describes the simulation. Flags: ARGS="--first SEED --seeds N --seconds S".
simulate: install-dev ## simulate the engine under seeded faults; ARGS="--seeds N"
	$(BIN)/python tests/simulation/run.py --jobs 2 $(ARGS)

# tests/nightly/README.md describes the harnesses and their flags.
acceptance: install-dev ## test a real server under faults and load; ARGS="faults --count 50"
	$(BIN)/python -P tests/nightly/acceptance/run.py $(ARGS)

# Each command runs, also if those before it failed; the last line names those that failed.
HARNESSES := faults,--count,100,--deterministic engines streams cost soak adapters hostile
FUZZERS := http wire safetensors images
nightly: install-dev ## run all harnesses, fuzzers and clients of tests/nightly (about four hours)
	@failed=; run() { echo "== $$*"; "$$@" || failed="$$failed $$(basename $$3 .py):$$4"; }; \
	for each in $(HARNESSES); do \
		run $(BIN)/python -P tests/nightly/acceptance/run.py $$(echo $$each | tr , ' '); done; \
	for each in $(FUZZERS); do run $(BIN)/python -P tests/nightly/acceptance/fuzz_$$each.py --seconds 1200; done; \
	run $(BIN)/python -P tests/nightly/models/transformers_matrix.py; \
	run $(BIN)/python -P tests/simulation/run.py --jobs 2 --seeds 100000 --seconds 1800; \
	run $(BIN)/pytest -m "" tests/nightly/browser tests/nightly/clients tests/nightly/gpu tests/nightly/models tests/nightly/traces; \
	test -z "$$failed" || { echo "failed:$$failed" >&2; exit 1; }

# The pages are opened in an installed browser, or else in Debian's chromium, installed here.
test-browser: install-dev ## test the page at / and the HTML report of a replay in a real browser
	command -v chromium || command -v google-chrome || { \
		sudo=$$(test "$$(id -u)" = 0 || command -v sudo); \
		$$sudo apt-get update -q && $$sudo apt-get install -q -y --no-install-recommends chromium fonts-dejavu-core; }
	$(PYTEST) -m slow tests/nightly/browser

# Needs the package registries of Python and node; docs/clients.md has the results. Missing clients are skipped.
test-clients: install-dev ## test the newest releases of clients, each installed into .clients
	$(PYTEST) -m slow -s tests/nightly/clients

docs: install ## build the pages as a site, into build/site
	$(STEP) "Installing what builds the site into $(VENV)" $(PIP) -e ".[docs]"
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet -f tools/site/mkdocs.yml
	@echo "build/site/index.html"

# The rules read only files that changed; with CI set, as .ci/run does, all of them.
lint: install-dev ## run ruff and mypy, and check the rules about the repository
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python tools/rules/rules.py $(if $(CI),--whole)
	$(BIN)/mypy

# Runs on a machine with a network. Its .gitignore hides the folder from git.
gpu-wheels: ## download wheels for gpu-check on a machine without a network
	mkdir -p $(WHEELS)
	rm -f $(WHEELS)/*.whl
	echo '*' > $(WHEELS)/.gitignore
	$(PYTHON) -P -m pip download --quiet --disable-pip-version-check --only-binary=:all: --no-deps \
		--implementation cp --python-version $(GPU_PYTHON_VERSION) $(foreach n,34 31 28 27 24 17,--platform manylinux_2_$(n)_x86_64) \
		--platform manylinux2014_x86_64 --dest $(WHEELS) $(GPU_PACKAGES)

# Runs on the GPU machine with its own Python (PYTHON=...), which has torch and triton. ARGS="--quick"
# benchmarks fewer shapes; OUT=DIR writes gpu-check.json to that folder as well.
gpu-check: ## check the GPU path on a GPU machine, with the wheels of gpu-wheels
	$(PYTHON) -P tests/nightly/gpu/check.py --wheels $(WHEELS) $(if $(OUT),--out "$(OUT)") $(ARGS)

clean: ## remove .venv and caches
	rm -rf $(VENV) .clients build *.egg-info .pytest_cache .rules_cache .mypy_cache .ruff_cache .hypothesis
