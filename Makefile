# make demo   sets everything up and runs the main job: an optimisation task judged by the gatekeeper (2 cores, no GPU)
# make test   passes the fast tests;  make test-slow the slow ones;  make lint the static checks
SHELL := /bin/bash
PYTHON ?= python3
PIP_ARGS ?=
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: help setup demo test test-slow lint format bench doctor mutants clean
.DEFAULT_GOAL := help

help:
	@sed -n 's/^# //p' Makefile
	@echo "others: setup doctor bench format mutants clean"

setup: $(STAMP)

$(STAMP): requirements.txt pyproject.toml k3_backend/pyproject.toml
	@command -v g++ >/dev/null || { echo "g++ is missing: what: no C++ compiler; expected: g++ 12 or newer on PATH; next: apt-get install g++" >&2; exit 2; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "$(PYTHON) is too old; expected: Python 3.11 or newer; next: make PYTHON=python3.11 $(MAKECMDGOALS)" >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check $(PIP_ARGS) -r requirements.txt
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e . -e ./k3_backend
	@bash tools/install-sandbox.sh
	@touch $@

demo: setup
	$(BIN)/fasttrack optimize tasks/cpu-kda-decode.toml

test: setup
	$(BIN)/python -m pytest -m "not slow" -q

test-slow: setup
	$(BIN)/python -m pytest -m slow -q

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: setup
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: setup
	$(BIN)/fasttrack bench --target cpu

mutants: setup
	$(BIN)/python tests/hostile/mutants/cuda/make.py

doctor: setup
	$(BIN)/fasttrack doctor

clean:
	rm -rf build .mypy_cache .ruff_cache .pytest_cache .hypothesis .coverage htmlcov
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +
