# Two commands set everything up: `make demo` compresses the embedded model, `make test` passes the tests.
PYTHON ?= python3
VENV ?= .venv

.PHONY: demo test lint
demo: $(VENV)/installed
	$(VENV)/bin/moe-compress demo

test: $(VENV)/installed
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy
	$(VENV)/bin/python -m pytest -n 2

lint: $(VENV)/installed
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy

$(VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --constraint constraints.txt torch
	$(VENV)/bin/python -m pip install --quiet --constraint constraints.txt --editable ".[dev,quantized]"
	touch $@
