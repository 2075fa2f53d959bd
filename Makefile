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

VENV := .venv
READY := $(VENV)/ready
QUICKSTART_READY := $(VENV)/quickstart-ready
RUN := OMP_NUM_THREADS=1 $(VENV)/bin/
# Most tests run side by side, one more than there are cores, because some wait for other processes. Those around Ray or a
# server start many processes of their own and run in two lanes (`tests/conftest.py`).
SIDE_BY_SIDE = -n $(shell $(VENV)/bin/python -c "import os; print(min(8, os.cpu_count() + 1))") --dist=worksteal
IN_TWO_LANES := -n 2 --dist=loadscope
# The first one forks, which it can only before Ray is in its process; the second must publish while episodes are played.
AROUND_SERVERS := tests/examples/test_killed_ranks.py tests/rollout/test_many_episodes.py tests/ray tests/rollout/vllm tests/third_party_backend
PYPROJECTS := pyproject.toml $(wildcard packages/*/pyproject.toml)

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup quickstart quickstart-picture real-model test check types fast-tests learn soak bench docs public-api constraints release parity gpu gpu-check clean

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

# The tests and the recipe `smollm2` make it too, where it is missing.
real-model: $(READY)  ## make the pretrained model of tests/real_model, once, in runs/models/smollm2
	$(RUN)python -m rl_examples.smollm2_model runs/models/smollm2

test: $(READY)  ## run all tests (ARGS="tests/core -k grpo" runs some)
ifeq ($(ARGS),)
	@status=0; \
	$(RUN)python -m pytest $(SIDE_BY_SIDE) $(addprefix --ignore=,$(AROUND_SERVERS)) || status=$$?; \
	$(RUN)python -m pytest $(IN_TWO_LANES) $(AROUND_SERVERS) || status=$$?; \
	exit $$status
else
	$(RUN)python -m pytest $(ARGS)
endif

check: $(READY)  ## lint, format, types, fast tests: about three minutes
	$(VENV)/bin/ruff check
	$(VENV)/bin/ruff format --check
	@$(MAKE) --no-print-directory --jobs=2 types fast-tests

# Side by side, because the tests do not keep all cores busy.
types: $(READY)
	$(VENV)/bin/pyright

fast-tests: $(READY)
	$(RUN)python -m pytest -n logical --maxprocesses=8 --dist=worksteal tests/core tests/workspace -m "not slow and not learn and not soak and not gpu" $(ARGS)

learn: $(READY)  ## train until the curves of docs/ are reached, hours (CASE=name runs one)
	$(RUN)python -m pytest -m learn --timeout=0 $(if $(CASE),-k $(CASE)) $(ARGS)

soak: $(READY)  ## kill runs at every step, sweep configurations, hours
	$(RUN)python -m pytest -m soak --timeout=0 $(ARGS)

bench: $(READY)  ## measure: ratios, taken within one run
	@for benchmark in benchmarks/*.py benchmarks/peers/*.py; do echo "== $$benchmark"; PYTHONPATH=. $(RUN)python $$benchmark $(ARGS); done

docs: $(READY)  ## write the generated pages of docs/ again
	$(RUN)python -m tools.key_table
	$(RUN)python -m rl_core.config.reference > docs/configuration.md.new
	mv docs/configuration.md.new docs/configuration.md
	$(RUN)python -m tools.megatron_page > docs/megatron.md.new
	mv docs/megatron.md.new docs/megatron.md
	$(RUN)python -m tools.chat_template_page > docs/chat_templates.md.new
	mv docs/chat_templates.md.new docs/chat_templates.md

quickstart-picture: quickstart  ## run the quick start and draw the README's picture from it: docs/quickstart.png
	$(RUN)python -m tools.quickstart_picture runs/quickstart docs/quickstart.png

parity: $(READY)  ## measure every backend and mesh against plain transformers again: docs/parity.md
	rm -rf .parity
	RL_PARITY_DIR=.parity $(RUN)python -m pytest $(SIDE_BY_SIDE) -m "not gpu" tests/fsdp/test_conformance.py tests/deepspeed/test_conformance.py \
	  tests/megatron/test_conformance.py tests/supervised/test_pairs.py
	RL_PARITY_DIR=.parity $(RUN)python -m pytest -m "not gpu" tests/real_model/test_backends.py tests/real_model/test_bfloat16.py \
	  tests/rollout/vllm/test_real_model.py tests/rollout/vllm/test_router_replay.py
	$(RUN)python -m pytest $(SIDE_BY_SIDE) -m parity tests/deepspeed/test_critic_and_lora.py tests/deepspeed/test_gradient_sums.py \
	  tests/deepspeed/test_plan.py tests/megatron/test_router_replay.py
	$(RUN)python -m rl_transformers.testing.parity .parity > docs/parity.md

public-api: $(READY)  ## write tests/workspace/public_api.txt again, after a public name changed on purpose
	$(RUN)python -m tests.workspace.public_api

constraints: $(READY)  ## write constraints.txt and the lock files again, after a dependency changed
	$(RUN)python -m tools.locks $(shell command -v $(UV))

release: $(READY)  ## build wheels and source distributions of all packages in dist/, check and try them: docs/releasing.md
	rm -rf dist
	$(UV) build --quiet --all-packages --out-dir dist
	$(RUN)python -m tools.release dist
	RL_DIST=$(CURDIR)/dist $(RUN)python -m pytest tests/workspace/test_wheels.py

gpu: $(READY)  ## run the tests that need a GPU, or say that none could run: docs/first_gpu_run.md
	@$(VENV)/bin/python -c 'import sys, torch; torch.cuda.is_available() or \
	  sys.exit(f"no test ran: torch {torch.__version__} finds no CUDA device (make gpu runs the tests marked gpu)")'
	$(RUN)python -m pytest -m gpu $(shell grep -rl --include='test_*.py' 'mark\.gpu' tests) $(ARGS)

# What only a GPU machine runs, as far as it can be checked without one.
gpu-check: $(READY)  ## check names of vLLM, Megatron and Transformer Engine in their GPU wheels, and that the versions of the GPU locks fit each other
	rm -rf .tools/gpu-wheels
	$(RUN)python -m tools.gpu_check --fetch --resolve $(shell command -v $(UV)) .tools/gpu-wheels

clean:  ## remove what set-up and tests made; runs/ stays
	rm -rf $(VENV) .tools .pytest_cache .ruff_cache .hypothesis uv.lock
