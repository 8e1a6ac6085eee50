# Each of these does its own set-up: it needs Python 3.11 or newer and nothing else.
#   make train      train a small Llama on 8 simulated devices, fully sharded
#   make compare    every strategy on the same data: one table, one picture, in runs/compare
#   make test       format, types, docs, tests in four minutes (a fifth of the tests, each eighth of their cells; SLOW=1 all tests, also those of 3 s and more; EVERY=3 those and a third of the cells)
#                   Each commit begins at another cell: the run prints at which, and the command that runs the same again (make test FROM=3)
#   make test ROOM=parallel/pipeline   the tests of one room alone, in two minutes: a folder or file below tests/, or a room of jaxpar/
#   make mutants    planted defects, one at a time in a copy of the tree: which ones the tests find (ROOM=parallel, ONLY=ring-chunk, EVERY=3)
#   make battery    what CI leaves out: every strategy x every model, not only a covering array, and so on
#   make soak       every strategy family on every model, 200 steps each, beside busy processes and on one core (SECONDS=120 FROM=0 JOBS=1)
#   make fuzz       random programs under random strategies beside one device, random losses that couple rows (SECONDS=600 SEED=0 FROM=0 COUNT=100 JOBS=2)
#   make campaign   runs that are killed and broken on purpose: what they lose, and how they end (SECONDS=600, SHORT=1)
#   make radar      a dozen strategies compiled for H100s by this jax: every collective beside the traced one, what hides, experiments/results/radar.md
#   make gpu-compiler   what compiling for GPUs without a GPU takes (about 1.5 GB); tests that need it then run
#   make bench      how fast it is beside plain jit, code by hand and torch; fails if 10% worse than stored (STORE=1 stores)
#   make package    a wheel and an sdist, built, installed into an empty environment, and tried
#   make orbax-env  an environment with Orbax and without jaxpar, in which a test reads jaxpar's checkpoints
#   make constraints   the exact versions of this environment, into constraints.txt, once its tests have passed
#   make hf         torch and transformers, with which weights from Hugging Face are compared; those tests then run
# Overridable: PYTHON=python3.13  VENV=.venv313  WORKERS=2

VENV ?= .venv
WORKERS ?= 2
SUITABLE := import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 14))
# By trial, since the shims of version managers are on PATH even for versions that they cannot run.
ifndef PYTHON
PYTHON := $(firstword $(foreach p,python3.13 python3.12 python3.11 python3.14 python3,\
	$(shell $(p) -c '$(SUITABLE)' 2>/dev/null && echo $(p))))
endif

BIN := $(VENV)/bin
# A worker that crashes ends the run: pytest-xdist would wait forever for the other tests of its group.
PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup --max-worker-restart=0
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check
# Models that others wrote, which the tests train unmodified. --no-deps: with them come 80 packages that their models do
# not import. Those that they do import, and solvers that losses call:
PACKAGES := flaxmodels==0.1.3 google-tunix==0.1.7 flaxdiff==0.2.11
IMPORTED := diffrax einops filelock h5py jaxtyping lineax optimistix regex requests tqdm

.PHONY: train compare test pytest mutants package battery soak fuzz campaign radar lint format types docs bench constraints gpu-compiler hf orbax-env setup
.PHONY: clean

train: setup
	JAX_PLATFORMS=cpu $(BIN)/jaxpar train --out runs/train --overwrite --evaluate-every 50 --evaluate-batches 50

compare: setup
	$(BIN)/python experiments/compare.py

# Which cells of a test run: one in so many, from one that the commit's hash decides, so that the next commits run others.
# `make test` runs a fifth of the tests, in turn, and always those that a planted defect needs (tests/defects.py). CI runs
# all tests except slow ones, of which it takes half in turn (ROTATE_SLOW=2).
EACH = $(or $(EVERY),8)
START = $(or $(FROM),$(shell hash=$$(git rev-parse HEAD 2>/dev/null | cut -c 1-7); echo $$((0x$${hash:-0} % (5 * $(EACH))))))
CELLS = --sample $(EACH) --from $(START) $(if $(ROTATE_SLOW),--rotate-slow $(ROTATE_SLOW)) $(if $(EVERY)$(SLOW),,-m 'not slow' $(if $(ROOM),,--rotate 5))
AGAIN = make test $(if $(filter-out .venv,$(VENV)),VENV=$(VENV) )$(if $(ROOM),ROOM=$(ROOM) )$(if $(EVERY),EVERY=$(EVERY) )$(if $(SLOW),SLOW=$(SLOW) )$(if $(ROTATE_SLOW),ROTATE_SLOW=$(ROTATE_SLOW) )FROM=$(START)

test: $(VENV)/.packages
ifdef ROOM
	@$(MAKE) --no-print-directory PYTHON="$(PYTHON)" pytest
else
	@$(MAKE) --no-print-directory PYTHON="$(PYTHON)" lint
	@$(MAKE) --no-print-directory --jobs=2 PYTHON="$(PYTHON)" types pytest
endif

# It builds the docs too (tests/test_site.py). Beside the types, of which pyright's one process takes as long as many tests.
pytest: $(VENV)/.packages
	@paths="$(if $(ROOM),$$($(BIN)/python tests/rooms.py $(ROOM)))" && \
	echo "one cell in $(EACH) of each test, from cell $(START); to run the same again: $(AGAIN)" && \
	$(PYTEST) $(CELLS) $$paths

mutants: $(VENV)/.packages
	$(BIN)/python tests/mutants.py --sample $(EACH) --from $(START) $(if $(EVERY)$(SLOW),--slow) $(if $(ROOM),--room $(ROOM)) $(if $(ONLY),--only $(ONLY))

battery: $(VENV)/.packages
	$(PYTEST) --battery

package: setup
	$(BIN)/python tests/package.py

soak: setup
	$(BIN)/python tests/soak.py $(if $(SECONDS),--seconds $(SECONDS)) $(if $(FROM),--from $(FROM)) $(if $(JOBS),--jobs $(JOBS))

fuzz: setup
	PYTHONPATH=tests $(BIN)/python -m fuzz $(if $(SECONDS),--seconds $(SECONDS)) $(if $(SEED),--seed $(SEED)) $(if $(JOBS),--jobs $(JOBS)) $(if $(FROM),--from $(FROM)) $(if $(COUNT),--count $(COUNT))

campaign: setup
	$(BIN)/python tests/campaign.py $(if $(SHORT),--short) $(if $(SECONDS),--seconds $(SECONDS))

radar: gpu-compiler
	$(BIN)/python experiments/radar.py $(if $(ONLY),--only $(ONLY))

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: setup
	$(BIN)/basedpyright --pythonpath $(BIN)/python

docs: setup
	$(BIN)/zensical build --clean --strict

bench: setup
	$(BIN)/python experiments/benchmarks/suite.py $(if $(STORE),--store)

constraints: setup
	$(BIN)/python tests/constraints.py

setup: $(VENV)/.installed

gpu-compiler: $(VENV)/.gpu-compiler

hf: $(VENV)/.hf

orbax-env: .venv-orbax/.installed

$(VENV)/.installed: pyproject.toml
ifeq ($(PYTHON),)
	$(error jaxpar needs Python 3.11 to 3.14, and PATH has none; install one, or name it: make PYTHON=/path/to/python3.12)
endif
	@echo "setting up $(VENV) with $$($(PYTHON) --version); this happens once"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) >/dev/null || { rm -rf $(VENV); \
	  $(PYTHON) -m venv --without-pip $(VENV) && $(PYTHON) -m pip --python $(BIN)/python install --quiet pip; } || { \
	  rm -rf $(VENV); echo "$(PYTHON) has neither venv nor pip; on Debian: apt install python3-venv"; exit 1; }
	@$(INSTALL) --editable '.[dev]'
	@touch $@

$(VENV)/.packages: $(VENV)/.installed Makefile
	@$(INSTALL) $(IMPORTED)
	@$(INSTALL) --no-deps $(PACKAGES)
	@touch $@

# The plugin must be of jax's own version. Of jax[cuda12]'s 14 packages the compiler needs these, and no driver.
$(VENV)/.gpu-compiler: $(VENV)/.installed
	@jax=$$($(BIN)/python -c 'from importlib.metadata import version; print(version("jaxlib"))') && \
	$(INSTALL) --no-deps jax-cuda12-plugin==$$jax jax-cuda12-pjrt==$$jax nvidia-cuda-nvcc-cu12 'nvidia-cudnn-cu12<10'
	@touch $@

# On Linux this torch brings CUDA (some GB); PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu has it without.
$(VENV)/.hf: $(VENV)/.installed
	@$(INSTALL) torch==2.13.0 'transformers>=4.57,<6' torchdata
	@touch $@

# Orbax reads what jaxpar wrote, as anybody has it: of the same jax and Orbax, and nothing of jaxpar.
.venv-orbax/.installed: $(VENV)/.installed
	@$(BIN)/python -m venv .venv-orbax >/dev/null
	@versions=$$($(BIN)/python -c 'from importlib.metadata import version as v; print(*(f"{n}=={v(n)}" for n in ("jax", "jaxlib", "orbax-checkpoint")))') && \
	.venv-orbax/bin/python -m pip install --quiet --disable-pip-version-check $$versions
	@touch $@

clean:
	rm -rf $(VENV) .venv-orbax .pytest_cache .ruff_cache site
