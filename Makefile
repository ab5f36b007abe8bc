PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: train test lint bench clean

train: $(VENV)/.installed
	$(BIN)/megajax train $(ARGS)

test: $(VENV)/.installed-dev
	$(BIN)/pytest -n 2 $(ARGS)

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(VENV)/.installed
	$(BIN)/python benchmarks/cpu.py $(ARGS)

$(VENV)/.installed: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "megajax needs Python 3.11 or later: make PYTHON=/path/to/python3.12")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --editable .
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(BIN)/pip install --quiet --editable '.[dev]'
	@touch $@

clean:
	rm -rf $(VENV)
