# Two commands for a newcomer: `make quickstart` and `make test`. Each makes .venv and installs first.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# No network, and one thread a process: two OpenMP threads on busy cores are ten times slower than one.
OFFLINE := OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 HF_DATASETS_OFFLINE=1 WANDB_MODE=disabled TOKENIZERS_PARALLELISM=false

.PHONY: quickstart test check format clean

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(None if (3, 10) <= sys.version_info < (3, 13) else "Python 3.10 to 3.12 is needed: make PYTHON=python3.11 ...")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	@echo "Installing torch, Composer, LLM-Foundry and the rest into $(VENV): about 7 GB, some minutes."
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	touch $@

quickstart: $(VENV)/.installed
	$(OFFLINE) $(BIN)/python -m asymloop_foundry.quickstart

test: $(VENV)/.installed
	$(OFFLINE) $(BIN)/python -m pytest

check: $(VENV)/.installed
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(VENV)/.installed
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) runs
