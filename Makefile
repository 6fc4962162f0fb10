# Two commands for a fresh machine: `make demo` (install and train a small model) and `make test`.

# The Python to build the environment with: 3.10 to 3.14, with venv.
PYTHON ?= $(shell for p in python3.12 python3.11 python3.10 python3.13 python3.14 python3; do \
	$$p -c 'import sys, ensurepip, venv; sys.exit(not (3, 10) <= sys.version_info < (3, 15))' 2>/dev/null \
	&& { echo $$p; break; }; done)
VENV ?= .venv
BIN := $(VENV)/bin
# torch from a CUDA build on machines with an NVIDIA GPU comes with the plain name; TORCH pins another build.
TORCH ?= torch==2.13.0
TORCHTITAN := "torchtitan>=0.3; python_version >= '3.11'"

# What the demo trains: 124 M parameters where PyTorch sees a GPU with FP8 products (compute capability 8.9) and 26 GB,
# which its twin in BF16 needs; 5 M elsewhere.
DEMO ?= configs/$$($(BIN)/python -c 'import torch; \
	large = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9) \
		and torch.cuda.get_device_properties(0).total_memory > 26e9; \
	print("llama-124m" if large else "demo")').toml

.PHONY: demo test nightly lint docs gpu-test attack dist install install-dev clean

demo: install
	@echo "Training begins; after its first steps it says how long it takes on this machine."
	$(BIN)/overcoat train $(DEMO)

test: install-dev lint docs
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "not gpu and not nightly"
	TRITON_INTERPRET=1 $(BIN)/python -m pytest -n 2 --dist worksteal tests/kernels

# What is slow and seldom breaks: the full products of what `make test` checks a part of.
nightly: install-dev
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "nightly and not gpu"
	TRITON_INTERPRET=1 $(BIN)/python -m pytest -n 2 --dist worksteal -m "nightly and not gpu" tests/kernels
	$(BIN)/python -m tests.mutations

lint: install-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The site, into build/site: links that lead nowhere fail it.
docs: install-dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet

gpu-test: install-dev
	$(BIN)/python -m pytest -m gpu

# The long attack, an hour; the short one is part of `make test`.
attack: install-dev
	$(BIN)/python -m tests.attack

# Wheel and sdist in dist/, tried in empty environments: with all that [all] brings by the Python of .venv, and alone by
# every other one of this machine. FULL names others that are to get everything, a GB or more each.
FULL ?=
dist: install-dev
	rm -rf dist
	$(BIN)/python -m build --quiet
	$(BIN)/python -m tests.wheel dist/*.whl --full "$(TORCH)" $(FULL)

install: $(VENV)/installed-hf
install-dev: $(VENV)/installed-dev

$(BIN)/python:
	$(if $(PYTHON),,$(error Python 3.10 to 3.14 with venv is needed: install one, or give its path as PYTHON=...))
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(TORCH)

$(VENV)/installed-%: $(BIN)/python pyproject.toml
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ".[$*]"
	$(if $(filter dev,$*),$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps $(TORCHTITAN))
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info
