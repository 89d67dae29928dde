# Two commands set everything up: `make demo` compresses the embedded model, `make test` passes the tests.
PYTHON ?= python3
VENV ?= .venv
PYTEST = $(VENV)/bin/python -m pytest -n 2 --dist worksteal
PINS = --constraint constraints.txt
TORCH ?= torch

# A language model of 135M parameters and its figures: three hours on two cores; a killed run goes on where it was.
REAL = --text real/text/calibration.jsonl --heldout real/text/heldout.jsonl --questions real/text/questions.jsonl
RESULTS = $(VENV)/bin/python -m scripts.benchmarks.results

.PHONY: demo real test test-fast test-latest test-all lint docs
demo: $(VENV)/usable
	$(VENV)/bin/moe-compress demo
	@echo "To type moe-compress alone: source $(VENV)/bin/activate"

real: $(VENV)/installed
	$(VENV)/bin/python -m scripts.make_real_model real --variants smollm2-moe
	$(RESULTS) measure real/smollm2-moe --name smollm2-moe --title SmolLM2-MoE --only real $(REAL) --samples 64 --length 512
	$(RESULTS) write

# The same every time: no random seed, and hypothesis derandomised (the profile `fast` of tests/conftest.py).
test: lint docs test-fast

test-fast: $(VENV)/installed
	PYTHONHASHSEED=0 $(PYTEST) -m "not full"

# The fast tests with today's newest releases, as users get them; TORCH=torch==2.13.0, say, chooses torch's.
test-latest:
	rm -rf .venv-latest
	$(MAKE) test-fast VENV=.venv-latest PINS=

# What computes plans is tested once more as a processor without vector instructions would; reading them differs nowhere.
DECIDING = tests/strategies tests/compressor/test_tolerance.py tests/compressor/steps/prune

# What `make test` leaves out, and properties once more with random seeds and more examples.
test-all: $(VENV)/installed
	$(PYTEST) -m "full or hypothesis" --hypothesis-profile full
	ATEN_CPU_CAPABILITY=default ONEDNN_MAX_CPU_ISA=AVX2 OPENBLAS_CORETYPE=Haswell $(PYTEST) $(DECIDING)
	scripts/check_wheel.sh $(VENV)/bin/python

lint: $(VENV)/installed
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy

docs: $(VENV)/installed
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --quiet --strict
	@echo "Written to site/; python3 -m http.server --directory site serves it"

$(VENV)/usable: pyproject.toml constraints.txt
	@echo "Setting up $(VENV): minutes of downloads, and 2 GB of disk, or more with CUDA's libraries"
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet $(PINS) $(TORCH)
	$(VENV)/bin/python -m pip install --quiet $(PINS) --editable ".[all]"
	touch $@

$(VENV)/installed: $(VENV)/usable
	$(VENV)/bin/python -m pip install --quiet $(PINS) --editable ".[dev]"
	touch $@
