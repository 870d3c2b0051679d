# attnforge: everything a contributor runs, by name. `make` alone prints the list.
# The only requirements are make and Python 3.11 or newer; the rest goes into .venv, pinned by constraints.txt.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

VENV := .venv
BIN := $(VENV)/bin
# Every extra that the tests use. Add to this list when a test needs another one.
EXTRAS ?= report,sklearn,parquet,lab,convert,onnx,lens,docs,notebook,dev
# Test processes. Two fit a small machine; each keeps to one thread so that they do not fight over cores.
JOBS ?= 2

# The stamp carries the extras in its name, so that asking for another set installs it.
comma := ,
STAMP := $(VENV)/.installed-$(subst $(comma),-,$(EXTRAS))

NEWER := import sys; sys.exit(sys.version_info < (3, 11))
ifndef PYTHON
PYTHON := $(shell for p in python3 python3.13 python3.12 python3.11 python3.14 python; do \
	if $$p -c '$(NEWER)' 2>/dev/null; then echo $$p; break; fi; done)
endif

.PHONY: help setup demo test lint docs bench browser clean

help: ## print this list
	@echo "make targets:"
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/  \1\t\2/p' Makefile | expand -t 12

$(STAMP): pyproject.toml constraints.txt
	@if ! $(or $(PYTHON),false) -c '$(NEWER)' 2>/dev/null; then \
		echo "attnforge needs Python 3.11 or newer; found: $$(python3 --version 2>&1 || true)." >&2; \
		echo "Install one, or name it: make PYTHON=/path/to/python3.11 $(MAKECMDGOALS)" >&2; exit 1; fi
	@if [ ! -x $(BIN)/python ]; then \
		echo "creating $(VENV) with $$($(PYTHON) --version)"; \
		$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }; fi
	@echo "installing attnforge[$(EXTRAS)] into $(VENV) (the first time takes minutes: torch is large)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[$(EXTRAS)]'
	@touch $@

setup: $(STAMP) ## install into .venv, editable, with every extra the tests use
	@echo "ready: $(BIN)/attnforge"

demo: $(STAMP) ## compile a formula, an MLP and a sequence function, fit heads, write pages to out/demo
	@$(BIN)/attnforge demo --force

# The lab's engine starts process pools and clusters and kills some of their workers: its tests have a process of their own.
# Not beside the others: what a shell starts in the background is deaf to Ctrl-C, which these tests press.
ENGINE := tests/lab/test_engine.py
# Rewritten tests are kept, whatever the shell says: without them every process spends ten seconds before its first test.
PYTEST := PYTHONDONTWRITEBYTECODE= HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest

# A file's tests run in one process, so that what it makes is made once; the order is that of tests/conftest.py. (Groups of
# tests, --dist loadgroup, are silently those of a test each where pytest is newer than pytest-xdist knows: 9.2 and 3.8.)
test: $(STAMP) $(if $(CI),browser) ## run all tests and the examples in the docstrings
	$(PYTEST) -n $(JOBS) --dist loadfile --no-loadscope-reorder --ignore=$(ENGINE)
	$(PYTEST) $(ENGINE)

lint: $(STAMP) ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/mypy

docs: $(STAMP) ## build the documentation site in out/site, offline; a broken link is an error
	@$(BIN)/python docs/live.py
	@PYTHONPATH=docs:src $(BIN)/zensical build --clean --strict
	@echo "open out/site/index.html"

bench: $(STAMP) ## run every script in benchmarks/; each prints its table and writes JSON to results/
	@shopt -s nullglob; for script in benchmarks/*.py; do echo "== $$script"; $(BIN)/python "$$script"; done

# Only the tests that open a page need a browser. On a CI machine it is installed; elsewhere nobody's system is touched.
browser: ## install Chromium for the page tests, where that is possible
	@if command -v chromium || command -v chromium-browser || command -v google-chrome; then :; \
	elif [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
		echo "installing chromium with apt-get"; \
		apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium >/dev/null \
			|| echo "chromium could not be installed: the tests that open a page will be skipped"; \
	else echo "no Chromium here, and no apt-get as root to install it: the tests that open a page will be skipped"; fi

clean: ## remove caches, builds and generated output, but not .venv
	rm -rf build dist out results docs/live .pytest_cache .ruff_cache .mypy_cache .hypothesis src/*.egg-info
	find src tests benchmarks docs -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true
