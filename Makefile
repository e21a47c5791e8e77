# One word an act, the same at the desk and in CI. Settings of the tools stand in pyproject.toml.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
INSTALLED := .venv/installed
INSTALL_LOG := .venv/install.log
TRAINERS := .cache/trainers/installed
TORCH_INDEX := https://download.pytorch.org/whl/cpu

# Where the caller's environment forbids it, each test process compiles all tests again: 17 s of CPU.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: help install fmt lint test test-all test-long demo nights crash crash-all mutants fuzz load loop bench gpu soak architectures healthy pages lock audit compat clean

help:
	@echo "make install | fmt | lint | test | test-all | test-long | demo | nights | crash | crash-all | mutants | fuzz | load | loop | bench | gpu | soak | architectures | healthy | pages | lock | audit | compat | clean"

install: $(INSTALLED)

$(INSTALLED): requirements/torch.txt requirements/cpu.txt requirements/dev.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null \
	  || { echo "Python 3.11 is needed: install it, or run make with PYTHON=/path/to/python3.11" >&2; exit 1; }
	@echo "installing into .venv: a few minutes the first time"
	@$(PYTHON) -m venv .venv
	@{ $(BIN)/python -m pip install --quiet --no-deps -r requirements/torch.txt \
	  && $(BIN)/python -m pip install --quiet --no-deps --require-hashes -r requirements/cpu.txt -r requirements/dev.txt \
	  && $(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --editable '.[service]' ; } >$(INSTALL_LOG) 2>&1 \
	  || { cat $(INSTALL_LOG) >&2; \
	       if grep -q 'No matching distribution found for torch==' $(INSTALL_LOG); then \
	         echo "the CPU build of torch is not in your indexes: PIP_EXTRA_INDEX_URL=$(TORCH_INDEX) make install" >&2; \
	       fi; exit 1; }
	@touch $@

fmt: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

lint: install
	$(BIN)/ruff check .
	$(BIN)/mypy

# Test processes: four for two cores (tests/conftest.py); tests of one file share what they set up. Files are taken
# in the order of tests/conftest.py, not those of few tests last, which are the longest.
PYTEST := $(BIN)/python -m pytest --numprocesses logical --dist loadfile --no-loadscope-reorder --durations 10
SLOW := slow or postgresql or outside or (engine and not short)

# What is run at every step: eleven minutes on two slow cores.
test: lint
	$(PYTEST) --maxprocesses 8 -m "not long and not ($(SLOW))"

# Everything slower. An engine has threads of its own: three side by side are enough.
test-all: install $(TRAINERS)
	$(PYTEST) --maxprocesses 3 -m "not long and ($(SLOW))"

# More models, engines and machines of tests that `make test-all` has one of.
test-long: install $(TRAINERS)
	$(PYTEST) --maxprocesses 3 tests/contract tests/e2e tests/serving -m long

# The trainers' own packages, in a folder apart: only the export tests read with their loaders.
$(TRAINERS): requirements/trainers.txt | install
	rm -rf .cache/trainers
	$(BIN)/python -m pip install --quiet --no-deps --require-hashes --target .cache/trainers --requirement $<
	@touch $@

demo: install
	@$(BIN)/python -m examples.demo

# A schedule whose nights are a minute apart, pushed to a Hub of this machine, to watch on the page.
nights: install
	@$(BIN)/python -m examples.nights

CRASH_PYTEST := $(BIN)/python -m pytest tests/crash -m "long or not long" --numprocesses logical --maxprocesses 8 --durations 10

# Kills, faults of the disk and the database, power cuts: a sample, drawn by a seed that is printed and may be given
# (`make crash SEED=7`), or every case, which takes hours. The short form is in `make test` and `make test-all`.
crash: install
	CRASH=sample SEED=$(SEED) $(CRASH_PYTEST)

crash-all: install
	CRASH=all SEED=$(SEED) $(CRASH_PYTEST)

# Takes out each raise and inverts each guard, one at a time, and runs the fast tests that reach it.
# MUTANTS="plan --sample 50" does some. Survivors are kept, with a reason each, in tests/mutants/survivors.txt.
mutants: install
	$(BIN)/python -m tests.mutants $(MUTANTS)

# Requests to every route, what users write, and damaged files: half an hour; then any sequence of what users and fate
# do, for STATEFUL_SECONDS on each database. `make test-all` runs the short form of both.
fuzz: STATEFUL_SECONDS ?= 7200
fuzz: install
	FUZZ_EXAMPLES=400 FUZZ_SECONDS=150 $(BIN)/python -m pytest tests/fuzz -m slow --numprocesses logical --durations 5
	STATEFUL_SECONDS=$(STATEFUL_SECONDS) $(BIN)/python -m pytest tests/stateful -m slow -rP --numprocesses 2

# 1,000 jobs, 8 workers on the fake engine, 400 listeners and 100 slow callers, for ten minutes.
load: install
	$(BIN)/python -m pytest tests/load -m long -s

# Trains drafters on Quarry's dataset, on the trainer's own dump and on wrong ones, serves each, and compares what
# is accepted. Then runs every command of docs/first-drafter.md.
loop: install $(TRAINERS)
	$(BIN)/python -m benchmarks.loop --save
	$(BIN)/python -m benchmarks.loop.turns --save
	$(BIN)/python -m pytest tests/e2e/test_guides.py -m long --numprocesses 1

# Ways to stored states side by side, and what a job's time goes to, the checks included.
bench: install
	$(BIN)/python -m benchmarks.bench
	$(BIN)/python -m benchmarks.job

# On a machine with a CUDA GPU: parts by their names (benchmarks/README.md, "On a GPU"), such as PART="exact job".
# PYTHON must have torch for CUDA, and vLLM for the engines or what benchmarks.gpu.carry brings; .venv has neither.
gpu:
	@$(PYTHON) -m benchmarks.gpu $(PART)

# Ten times the samples: as fast, and in the same memory?
soak: install
	$(BIN)/python -m benchmarks.job --long

# Runs every architecture that is due as a job on the real engine and writes docs/architectures.md: hours.
architectures: install
	$(BIN)/python -m tests.architectures.matrix

# 10,000 healthy samples on the real engine: an alarm is a fault of the checks.
healthy: install
	$(BIN)/python -m tests.architectures.healthy --save

# Pictures of each page of a service, in both themes and two widths. Needs Chromium.
pages: install
	$(BIN)/python -m tests.support.page_pictures

lock: install
	$(BIN)/python requirements/lock.py

# Asks for advisories on what is pinned, with a tool that is installed apart; fails where one cannot be asked for.
audit:
	$(PYTHON) -m venv .cache/audit
	.cache/audit/bin/python -m pip install --quiet pip-audit
	cd requirements && grep -h == torch.txt cpu.txt dev.txt cuda.txt trainers.txt | sed 's/[+ ].*//' | sort -u > ../.cache/audit/pins.txt
	.cache/audit/bin/pip-audit --strict --no-deps --disable-pip --requirement .cache/audit/pins.txt

# What moved, by name, in the newest vLLM and transformers among what we use: their sources are read, none is run.
# Then the wheel is installed alone, beside trainers and with what serves. Both need an index.
compat: install
	$(BIN)/python -m tests.compat
	$(BIN)/python -m tests.compat.install

# Keeps .venv, so that the next word is quick, and data folders of a service, which are not ours to delete.
clean:
	rm -rf .cache .carry demo-out build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage
	find . -name __pycache__ -type d -not -path './.venv/*' -prune -exec rm -rf {} +
