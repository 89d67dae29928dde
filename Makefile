# Two commands set everything up: `make demo` compresses the embedded model, `make test` passes the tests.
PYTHON ?= python3
VENV ?= .venv

.PHONY: demo test lint docs
demo: $(VENV)/installed
	$(VENV)/bin/moe-compress demo

# What computes plans is tested once more as a processor without vector instructions would; reading them differs nowhere.
DECIDING = tests/strategies tests/compressor/test_tolerance.py tests/compressor/steps/prune

test: $(VENV)/installed
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --quiet --strict
	$(VENV)/bin/python -m pytest -n 2 --dist worksteal
	ATEN_CPU_CAPABILITY=default ONEDNN_MAX_CPU_ISA=AVX2 OPENBLAS_CORETYPE=Haswell \
		$(VENV)/bin/python -m pytest -n 2 --dist worksteal $(DECIDING)
	scripts/check_wheel.sh $(VENV)/bin/python

lint: $(VENV)/installed
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy

docs: $(VENV)/installed
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --quiet --strict
	@echo "Written to site/; python3 -m http.server --directory site serves it"

$(VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --constraint constraints.txt torch
	$(VENV)/bin/python -m pip install --quiet --constraint constraints.txt --editable ".[dev,quantized]"
	touch $@
