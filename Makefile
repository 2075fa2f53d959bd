# Everything that is done with this repository, set-up included. Needs Python 3.11, pip and git. `make help` lists the targets.
#
# Another Python:                     make test PYTHON=python3.12
# Further arguments for the command:  make test ARGS="tests/core -k grpo"
#                                     make quickstart ARGS="trainer.algorithm.eps_clip_high=0.2"

SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c

PYTHON ?= python3.11
SEED ?= 0
CASE ?=
ARGS ?=

# uv resolves and installs. A fitting one on PATH is used, else pip fetches it into .tools/, where it disturbs nothing.
UV_VERSION := 0.13.8
PRIVATE_UV := .tools/uv-$(UV_VERSION)/bin/uv
UV := $(if $(findstring uv $(UV_VERSION),$(shell uv --version 2>/dev/null)),uv,$(PRIVATE_UV))

# Where a site keeps wheels for pip, uv looks too (pip separates several places by spaces, uv by commas).
empty :=
space := $(empty) $(empty)
comma := ,
export UV_FIND_LINKS ?= $(subst $(space),$(comma),$(strip $(PIP_FIND_LINKS)))
# Wheels and cache often lie on different file systems; uv then copies, and need not say so.
export UV_LINK_MODE ?= copy

VENV := .venv
READY := $(VENV)/ready
QUICKSTART_READY := $(VENV)/quickstart-ready
RUN := OMP_NUM_THREADS=1 $(VENV)/bin/
# Most tests leave cores idle and run side by side; those around Ray or a server take the whole machine, one after another.
SIDE_BY_SIDE := -n logical --maxprocesses=8 --dist=worksteal
# The first one forks, which it can only before Ray is in its process; the second must publish while episodes are played.
ONE_AFTER_ANOTHER := tests/examples/test_killed_ranks.py tests/rollout/test_many_episodes.py tests/ray tests/rollout/vllm tests/third_party_backend
PYPROJECTS := pyproject.toml $(wildcard packages/*/pyproject.toml)

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup quickstart test check learn soak bench docs public-api constraints parity clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

$(PRIVATE_UV):
	$(PYTHON) -m pip install --quiet --disable-pip-version-check --target .tools/uv-$(UV_VERSION) uv==$(UV_VERSION)

# A stamp says that .venv matches every pyproject.toml, so a second make starts at once. Bytecode is compiled once, for the many
# processes of the tests, also where PYTHONDONTWRITEBYTECODE is set. The quick start needs neither vLLM nor
# Megatron; where they are installed already, they stay.
$(READY): $(PYPROJECTS) $(filter $(PRIVATE_UV),$(UV))
	$(UV) sync --quiet --python $(PYTHON) --all-packages --compile-bytecode
	@touch $@ $(QUICKSTART_READY)

$(QUICKSTART_READY): $(PYPROJECTS) $(filter $(PRIVATE_UV),$(UV))
	$(UV) sync --quiet --python $(PYTHON) --package rl-examples --no-default-groups --inexact
	@touch $@

setup: $(READY)  ## install everything into .venv

quickstart: $(QUICKSTART_READY)  ## teach a small model to add, in minutes, into runs/quickstart (SEED=n, ARGS="key.path=value …")
	$(RUN)rl train quickstart trainer.seed=$(SEED) trainer.run_dir=runs/quickstart $(ARGS)

test: $(READY)  ## run all tests (ARGS="tests/core -k grpo" runs some)
ifeq ($(ARGS),)
	@status=0; \
	$(RUN)python -m pytest $(SIDE_BY_SIDE) $(addprefix --ignore=,$(ONE_AFTER_ANOTHER)) || status=$$?; \
	$(RUN)python -m pytest $(ONE_AFTER_ANOTHER) || status=$$?; \
	exit $$status
else
	$(RUN)python -m pytest $(ARGS)
endif

check: $(READY)  ## lint, format, types, fast tests: under three minutes
	$(VENV)/bin/ruff check
	$(VENV)/bin/ruff format --check
	$(VENV)/bin/pyright
	$(RUN)python -m pytest $(SIDE_BY_SIDE) tests/core tests/workspace -m "not slow and not learn and not soak and not gpu" $(ARGS)

learn: $(READY)  ## train until the curves of docs/ are reached, hours (CASE=name runs one)
	$(RUN)python -m pytest -m learn --timeout=0 $(if $(CASE),-k $(CASE)) $(ARGS)

soak: $(READY)  ## kill runs at every step, sweep configurations, hours
	$(RUN)python -m pytest -m soak --timeout=0 $(ARGS)

bench: $(READY)  ## measure: ratios, taken within one run
	@for benchmark in benchmarks/*.py; do echo "== $$benchmark"; $(RUN)python $$benchmark $(ARGS); done

docs: $(READY)  ## write the generated pages of docs/ again
	$(RUN)python -m rl_core.config.reference > docs/configuration.md.new
	mv docs/configuration.md.new docs/configuration.md
	$(RUN)python -m tools.megatron_page > docs/megatron.md.new
	mv docs/megatron.md.new docs/megatron.md

parity: $(READY)  ## measure every backend and mesh against plain transformers again: docs/parity.md
	rm -rf .parity
	RL_PARITY_DIR=.parity $(RUN)python -m pytest $(SIDE_BY_SIDE) -m "not gpu" tests/fsdp/test_conformance.py tests/megatron/test_conformance.py
	$(RUN)python -m rl_core.testing.parity .parity > docs/parity.md

public-api: $(READY)  ## write tests/workspace/public_api.txt again, after a public name changed on purpose
	$(RUN)python -m tests.workspace.public_api

# From the index alone (no site's wheels), so no version carries a local label. The environment markers say the same on every
# line and go; a package with two versions keeps the Python version that tells them apart.
constraints: $(READY)  ## write constraints.txt again, after a dependency changed
	env -u UV_FIND_LINKS $(UV) pip compile --quiet packages/*/pyproject.toml --all-extras --universal --python-version 3.11 \
	  --no-emit-index-url --no-header --no-annotate $(patsubst packages/%/,--no-emit-package %,$(wildcard packages/*/)) \
	  | sed -E "s/ ; .*(python_full_version [<=]+ '3\.12[^']*').*/ ; \1/; t; s/ ;.*//" > constraints.txt

clean:  ## remove what set-up and tests made; runs/ stays
	rm -rf $(VENV) .tools .pytest_cache .ruff_cache .hypothesis uv.lock
