# `make train` and `make test` set up their own environment in .venv; `make help` lists the rest.
.DEFAULT_GOAL := help
SHELL := /bin/bash

# The first Python that really runs and can make environments: 3.12 (also one that pyenv only keeps), else another
# supported one. A pyenv shim of a version that is not selected exists as a command but fails when it is called.
PYENV_ROOT ?= $(HOME)/.pyenv
PYTHON ?= $(shell for p in python3.12 $(PYENV_ROOT)/versions/3.12*/bin/python python3.13 $(PYENV_ROOT)/versions/3.13*/bin/python \
	python3.11 $(PYENV_ROOT)/versions/3.11*/bin/python python3; do \
	"$$p" -c 'import ensurepip, sys, venv; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' >/dev/null 2>&1 && echo "$$p" && break; done)

BIN := .venv/bin
# Without the build backend's warnings, which ask nothing of the user.
INSTALL = PYTHONWARNINGS=ignore $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: help train test quick slow gpu planted results pages notebooks docs release stacks check clean

help: ## list the commands
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/'

# What `make test` installs brings JAX's CUDA plugin, which complains where there is no GPU.
ifeq ($(shell command -v nvidia-smi),)
train: export JAX_PLATFORMS ?= cpu
endif
train: .venv/train.stamp ## train a small Llama on text found on this machine, with bf16, FP8 optimizer states, FP8 products: 3 minutes
	$(BIN)/python -m experiments.train --recipe bf16 coat_optimizer te_current --model 1m --seq-len 128 --steps 300 \
		--eval-every 100 --eval-batches 8 --checkpoint-every 100 --log-every 50 --sample-tokens 0 $(ARGS)

test: .venv/test.stamp ## run the test suite; ARGS passes options to pytest
	FP8JAX_TEST_COMPILE=1 $(BIN)/python -m pytest -n 2 --dist worksteal $(ARGS)

quick: .venv/test.stamp ## run one fast test file for each folder that changed since HEAD (BASE=main: since main), two minutes
	$(BIN)/python -m tests.quick $(ARGS)

slow: ## run the tests that `make test` leaves out: before a release
	$(MAKE) test ARGS="-m slow $(ARGS)"

gpu: .venv/test.stamp ## run the GPU tests in five minutes, and list those that are left out
	@command -v nvidia-smi >/dev/null || { echo "make gpu needs an NVIDIA GPU, and there is no nvidia-smi here" >&2; exit 1; }
	FP8JAX_TEST_GPU=1 $(BIN)/python -m pytest -m "gpu and not slow" -n 6 --dist worksteal $(ARGS)
	@echo 'left out (make gpu ARGS="-m gpu" runs them, too):'
	@$(BIN)/python -m pytest --collect-only -q -m "gpu and slow" tests/kernels

planted: .venv/test.stamp ## plant bugs in a copy and say which the tests catch (ARGS="--only core")
	$(BIN)/python -m tests.planted $(ARGS)

results: .venv/test.stamp ## measure what README and RESULTS quote on this host's GPUs, file by file (ARGS=--list says what there is)
	$(BIN)/python -m experiments.results $(ARGS)

pages: .venv/test.stamp ## write RESULTS.md, results/pages, and the figures of README and docs/ from the files in results/
	for study in recipes intervals fixed_batch; do $(BIN)/python -m experiments.papers.parity --study $$study --judge || exit; done
	$(BIN)/python -m experiments.results.report

notebooks: .venv/test.stamp ## run the notebooks and save their outputs (ARGS="01 05": two of them)
	JAX_PLATFORMS=cpu $(BIN)/python .ci/notebooks.py $(ARGS)

docs: .venv/docs.stamp ## build the site into docs/_build/html: no warnings, and no link within it leads nowhere
	$(BIN)/python -m sphinx -W --keep-going -q -b html docs docs/_build/html
	$(BIN)/python docs/generate/links.py

stacks: ## test the oldest supported packages, the pinned and the newest, each in its own environment
	tests/stacks.sh oldest pinned newest

check: .venv/test.stamp ## formatting, lint and types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/pyright --pythonpath $(BIN)/python

release: .venv/release.stamp ## build sdist and wheel into dist/, check both as a user gets them, write the release's notes
	$(BIN)/python .ci/release.py $(ARGS)

clean: ## remove the environments
	rm -rf .venv .venv-oldest .venv-newest

.venv/bin/python:
	@test -n "$(PYTHON)" || { echo "no Python 3.11 to 3.13 with venv found; name one: make PYTHON=/path/to/python" >&2; exit 1; }
	"$(PYTHON)" -m venv .venv

.venv/%.stamp: pyproject.toml constraints.txt | .venv/bin/python
	@echo "installing fp8jax and the packages of $* into .venv (once)"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade 'pip>=25.1'
	$(INSTALL) --editable . --group $*
	@touch $@
