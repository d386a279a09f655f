# Needs python3 >= 3.11 and a package index. PYTHON picks the interpreter, VENV where its environment lives.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# A process per core; a file's tests stay together, because they share models and compiled steps.
PARALLEL := -n auto --dist loadfile

.PHONY: help venv demo test test-slow test-aot test-gpu lint clean

help:
	@echo "make demo       serve SmolLM2-135M on this CPU and stream three answers"
	@echo "make test       lint, then the CPU test suite without the tests marked slow"
	@echo "make test-slow  the tests marked slow"
	@echo "make test-aot   compile for H200 without one: registers, spills, XLA's schedule (python >= 3.12, ptxas)"
	@echo "make test-gpu   the tests that need a Hopper GPU (with the cuda13 extra installed)"
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
	JAX_PLATFORMS=cpu $(BIN)/python -m pytest $(PARALLEL) -m "not slow and not gpu and not aot"

test-slow: venv
	JAX_PLATFORMS=cpu $(BIN)/python -m pytest $(PARALLEL) -m "slow and not gpu and not aot"

# The plug-in brings XLA's GPU compiler (142 MB) and none of NVIDIA's libraries.
test-aot: venv
	@$(BIN)/python -c 'import sys; sys.exit(sys.version_info < (3, 12) and "test-aot needs python >= 3.12: jax 0.11")'
	@command -v ptxas > /dev/null || { echo "test-aot needs ptxas (CUDA toolkit) on the PATH"; exit 1; }
	version=$$($(BIN)/python -c 'import jax; print(jax.__version__)') && $(BIN)/python -m pip install --quiet \
	    --disable-pip-version-check --no-deps jax-cuda13-pjrt==$$version jax-cuda13-plugin==$$version
	JAX_PLATFORMS=cpu $(BIN)/python -m pytest -m aot

# Compiling takes most of the time, hence several processes; none may reserve the GPU's memory for itself.
test-gpu: venv
	XLA_PYTHON_CLIENT_PREALLOCATE=false $(BIN)/python -m pytest -n 6 -m gpu

lint: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python

clean:
	rm -rf $(VENV) build dist *.egg-info
