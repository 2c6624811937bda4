# Each target creates .venv and installs the package first where that has not been done; none edits files.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.PHONY: demo test lint
$(INSTALLED): setup.cfg pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[test,export]'
	touch $@

demo: $(INSTALLED)
	$(BIN)/python -c "import timm, torch, hgrn_vision; print(timm.create_model('hgrn_deit_tiny')(torch.randn(1, 3, 224, 224)).shape)"

test: $(INSTALLED)
	$(BIN)/python -m pytest -n 2

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

demo: $(INSTALLED)
	$(BIN)/python train_imagenet.py
