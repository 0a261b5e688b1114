# demo: the quickstart notebook in a real kernel, printed; lab: JupyterLab (LAB=--allow-root as root). Both install what
# running needs into .venv. setup: that and the development tools; the targets below do it themselves.
# test-fast, test, test-all: see docs/contributing.md; check: style, types and the rules for imports.
# parity: encoders and decoders against PyTorch, in an environment of its own under build/.
# screenshots: the panels as they are with the starter models, into docs/images; needs Chromium.
# gallery: all notebooks, run, as pages in build/gallery; clients: other projects' clients against a running server, in an
# environment of their own; binder: Binder's steps likewise, and its notebooks in 2 GB under a Hub's prefix; package: the
# wheel as a stranger installs it, in an empty environment: doctor, serve and a chat, without extras and with them.
# soak: faults, fuzz and load for half an hour, as a table and under build/soak (SOAK="--quick" for a look).
# bench: what was promised about speed, as a table and under build/bench (BENCH="--model tiny --quick" for a look).
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/installed
DEV_STAMP := $(VENV)/installed-dev
PARITY := build/parity
PARITY_STAMP := $(PARITY)/installed
CLIENTS := build/clients
CLIENTS_STAMP := $(CLIENTS)/installed
# Processes that test beside each other, a file of tests each: one for each core, 4 at most; 0 for none but make's own.
TEST_WORKERS ?= logical
PIP_ENV := PIP_DISABLE_PIP_VERSION_CHECK=1

.PHONY: setup lab demo test test-fast test-all coverage check parity panels blocking gallery clients binder package bench soak screenshots lock clean

setup: $(DEV_STAMP)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed: make PYTHON=python3.12" if sys.version_info < (3, 11) else 0)'
	@$(BIN)/python -c 'import pip, sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || \
	  { echo "creating the environment $(VENV)"; $(PYTHON) -m venv --clear $(VENV); }
	@$(BIN)/python install.py lab,gguf
	@touch $@

# Compiled at once: the tests start many processes, which would all compile where PYTHONDONTWRITEBYTECODE is set.
$(DEV_STAMP): $(STAMP)
	@$(BIN)/python install.py lab,gguf,dev --compile
	@touch $@

lab: $(STAMP)
	$(BIN)/jupyter lab $(LAB) notebooks/00_quickstart.ipynb

demo: $(STAMP)
	$(BIN)/python notebooks/demo.py notebooks/00_quickstart.ipynb

# One thread for each process: threads that wait for each other while others use the cores cost a tenth of the time.
# Bytecode is kept: the tests start hundreds of processes that would all compile the package again.
PYTEST := PYTHONDONTWRITEBYTECODE= OPENBLAS_NUM_THREADS=1 $(BIN)/python -m pytest --durations 20 \
  -n $(TEST_WORKERS) --maxprocesses 4 --dist loadfile --no-loadscope-reorder

test-fast: setup
	$(PYTEST) -m "not slow and not long"

test: setup
	$(PYTEST) -m "not long"

test-all: setup
	$(PYTEST)
	$(MAKE) parity

# Lines of the package that make test-all runs; slower than without.
coverage: setup
	mkdir -p build/coverage
	$(PYTEST) --timeout 900 --cov --cov-report=term:skip-covered

check: setup
	$(BIN)/ruff format --check lmx_lab tests notebooks benchmarks soak install.py
	$(BIN)/ruff check lmx_lab tests notebooks benchmarks soak install.py
	$(BIN)/mypy
	$(BIN)/mypy install.py
	$(BIN)/python -m pytest -q tests/test_architecture.py

parity: $(PARITY_STAMP)
	$(PARITY)/bin/python -m pytest tests/parity

# torch first and alone, so that nothing else chooses its version.
$(PARITY_STAMP): pyproject.toml constraints.txt constraints-parity.txt
	@$(PARITY)/bin/python -c 'import pip' 2>/dev/null || $(PYTHON) -m venv --clear $(PARITY)
	$(PIP_ENV) $(PARITY)/bin/python -m pip install --quiet --only-binary :all: -c constraints-parity.txt torch
	$(PIP_ENV) $(PARITY)/bin/python -m pip install --quiet --only-binary :all: --no-build-isolation -c constraints.txt hatchling editables
	$(PIP_ENV) $(PARITY)/bin/python -m pip install --quiet --only-binary :all: --no-build-isolation -c constraints.txt -c constraints-parity.txt --editable '.[dev,parity]'
	touch $(PARITY_STAMP)

# What a widget carries, from the plain files beside it.
panels: setup
	$(BIN)/python -m lmx_lab.panels.build

# The blocking clients, from the async ones.
blocking: setup
	$(BIN)/python -P lmx_lab/client/blocking/generate.py

gallery: setup
	$(BIN)/python notebooks/gallery.py build/gallery

clients: setup $(CLIENTS_STAMP)
	$(BIN)/python -m tests.other_clients.try_clients $(CLIENTS)

$(CLIENTS_STAMP): constraints-clients.txt
	@$(CLIENTS)/bin/python -c 'import pip' 2>/dev/null || $(PYTHON) -m venv --clear $(CLIENTS)
	$(PIP_ENV) $(CLIENTS)/bin/python -m pip install --quiet --only-binary :all: -c constraints-clients.txt langchain-openai llm litellm instructor
	touch $(CLIENTS_STAMP)

binder: setup
	$(BIN)/python -m tests.package.as_binder $(BINDER)

package: setup
	$(BIN)/python -m tests.package.as_installed

bench: setup
	$(BIN)/python -m benchmarks $(BENCH)

soak: setup
	$(BIN)/python -m soak $(SOAK)

screenshots: setup
	$(BIN)/python -m tests.browser.screenshots docs/images

# The versions that everything was tested with, from a fresh environment without constraints.
lock:
	rm -rf build/lock && $(PYTHON) -m venv build/lock
	build/lock/bin/python -m pip install --quiet uv hatchling editables
	build/lock/bin/python -m pip install --quiet --editable '.[lab,dev]'
	build/lock/bin/python -m pip freeze --exclude-editable --exclude pip --exclude setuptools > constraints.txt
	rm -rf build/lock

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache
