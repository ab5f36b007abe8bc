PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: train test test-slow test-faults lint inspect docs presets bench clean

# The JAX in .venv has no GPU support; JAX_PLATFORMS=cuda uses the GPUs if you have installed it.
train: export JAX_PLATFORMS ?= cpu
train: $(VENV)/.installed
	$(BIN)/megajax train $(ARGS)

test: $(VENV)/.installed-dev
	$(BIN)/pytest -n auto --maxprocesses 4 --dist worksteal -m 'not slow and not faults' $(ARGS)

test-slow: $(VENV)/.installed-dev
	$(BIN)/pytest -n 2 --dist worksteal -m 'slow and not exhaustive' $(ARGS)

# These tests also wait: for processes that start, and for time limits.
test-faults: $(VENV)/.installed-dev
	$(BIN)/pytest -n 3 --dist worksteal -m 'faults and not exhaustive' $(ARGS)

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# The step of the default config on simulated CPU devices and, where XLA's GPU compiler installs, that of the 8.3B model on 64 hosts of H100s.
inspect: $(VENV)/.installed
	$(BIN)/megajax inspect tiny
	@if $(MAKE) --quiet $(VENV)-gpu-compile/.installed; then \
	  $(VENV)-gpu-compile/bin/megajax inspect megatron_8.3b train.dtype=bfloat16 --target h100; \
	else echo "XLA's GPU compiler does not install here: no audit for H100"; fi

# The site, where mkdocs installs; `make test-slow` then opens its pages, where there is a Chromium.
docs:
	@if $(MAKE) --quiet $(VENV)-docs/.installed; then \
	  NO_MKDOCS_2_WARNING=1 $(VENV)-docs/bin/mkdocs build --strict && echo "site/index.html"; \
	else echo "mkdocs does not install here: no site"; fi

# Writes the fastest layout that `megajax plan` finds for H100s into each preset whose mesh is not a paper's.
presets: $(VENV)/.installed
	$(BIN)/python scripts/presets.py

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

# One command runs in it: Python compiles what that imports.
$(VENV)-gpu-compile/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)-gpu-compile
	$(VENV)-gpu-compile/bin/pip install --quiet --no-compile --editable '.[gpu-compile]'
	@touch $@

# The site is built from the sources, without importing them: megajax's own requirements are left out.
$(VENV)-docs/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)-docs
	$(VENV)-docs/bin/python -c 'import tomllib; \
	  project = tomllib.load(open("pyproject.toml", "rb"))["project"]; \
	  print(*project["optional-dependencies"]["docs"], sep="\n")' >$(VENV)-docs/requirements.txt
	$(VENV)-docs/bin/pip install --quiet --no-compile --requirement $(VENV)-docs/requirements.txt
	@touch $@

clean:
	rm -rf $(VENV) $(VENV)-gpu-compile $(VENV)-docs site .compiled
