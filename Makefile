# Needs python3 >= 3.11 and a package index. PYTHON picks the interpreter, VENV where its environment lives.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: help venv demo test test-slow lint clean

help:
	@echo "make demo       serve SmolLM2-135M on this CPU and stream three answers"
	@echo "make test       lint, then the CPU test suite without the tests marked slow"
	@echo "make test-slow  the tests marked slow"
	@echo "make lint       ruff and pyright"

venv: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "python >= 3.11 is needed, this is " + sys.version)'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

demo: venv
	$(BIN)/python -m serve.demo

test: venv lint
	$(BIN)/python -m pytest -m "not slow and not gpu"

test-slow: venv
	$(BIN)/python -m pytest -m "slow and not gpu"

lint: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python

clean:
	rm -rf $(VENV) build dist *.egg-info
