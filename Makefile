# Every target does its own set-up: a Python of 3.11 or newer and a C++ compiler are all it takes.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
RUN := runs/demo

.PHONY: help notebook demo test lint types imports unit bench clean

help:  ## What can be made
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 12

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit("MegaTrain needs Python 3.11 or newer; this is " + sys.version.split()[0] + ": set PYTHON=") if sys.version_info < (3, 11) else 0'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $@

notebook: $(READY)  ## Open JupyterLab at notebooks/finetune_120b.ipynb
	$(BIN)/jupyter lab $(if $(filter 0,$(shell id -u)),--allow-root) notebooks/finetune_120b.ipynb

demo: $(READY)  ## Train, save and reload a small gpt-oss in the terminal; writes runs/demo
	$(BIN)/megatrain demo --run-dir $(RUN)

test: lint types imports unit  ## Everything that CI runs

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)
	$(BIN)/mypy

imports: $(READY)
	$(BIN)/lint-imports

unit: $(READY)  # with compiled code kept, or each of the processes that tests start would compile all of it anew
	env -u PYTHONDONTWRITEBYTECODE OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses auto --dist loadfile --no-loadscope-reorder

bench: $(READY)  ## Beside plain Hugging Face, FSDP2 and DeepSpeed on this machine's CPU, into the README
	$(BIN)/python -m benchmarks.cpu
	$(BIN)/python -m benchmarks.publish

clean:  ## Remove what was built here
	rm -rf $(VENV) runs build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
