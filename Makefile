# Each target creates .venv and installs the package first where that has not been done; none edits files.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.PHONY: demo test test-machine lint bench

$(INSTALLED): setup.cfg pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[test,export,dense]'
	touch $@

demo: $(INSTALLED)
	$(BIN)/python train_imagenet.py

test: $(INSTALLED)
	$(BIN)/python -m pytest -n 2

# measurements: one at a time, on a machine that does nothing else
test-machine: $(INSTALLED)
	$(BIN)/python -m pytest -m machine

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

bench: $(INSTALLED)
	$(BIN)/python -m hgrn_vision bench --force
