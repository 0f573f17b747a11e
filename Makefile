# Two commands do everything on a fresh clone: `make test` and `make reproduce`. Both make .venv first.
PYTHON  ?= python3
PROFILE ?= smoke
RESUME  ?=
VENV    := .venv
RUN     := $(VENV)/bin/python

.DEFAULT_GOAL := help
.PHONY: help test test-gpu test-slow bench reproduce lab lock gpu smollm clean

help:
	@echo "make test                      install everything into .venv and run the default tests"
	@echo "make test-gpu                  the tests that need a CUDA GPU, after make gpu (SAGE_GPU_MODEL names a small model's folder)"
	@echo "make test-slow                 the tests of the weights that make smollm adds"
	@echo "make bench                     measure again what data/measured/benchmarks holds"
	@echo "make reproduce PROFILE=smoke   train, evaluate, draw: every notebook in order (RESUME=1 goes on where a run stopped)"
	@echo "make lab                       open JupyterLab on the notebooks"
	@echo "make gpu                       add what Unsloth wants on a GPU"
	@echo "make smollm                    add the weights that the profile smollm trains (98 MB)"
	@echo "make lock                      write requirements.lock and environment.yml anew from what is installed"
	@echo "make clean                     remove .venv (build/ and data/ stay)"

# torch first and with its dependencies, so that a GPU machine gets the CUDA build; then the full lock, which needs no
# resolving; then the project itself, editable. The stamp makes a second call instant.
$(VENV)/installed: requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "Python 3.11 or newer is needed, and $(PYTHON) is " + sys.version.split()[0] + ": call make PYTHON=python3.11 ...")'
	@echo "set-up 1/4: virtual environment in $(VENV)"
	@$(PYTHON) -m venv $(VENV)
	@echo "set-up 2/4: torch with its dependencies (a large download on a GPU machine)"
	@$(RUN) -m pip install --quiet --disable-pip-version-check --constraint requirements.lock "$$(grep '^torch==' requirements.lock)"
	@echo "set-up 3/4: $$(grep -c == requirements.lock) packages of requirements.lock"
	@$(RUN) -m pip install --quiet --disable-pip-version-check --no-deps --requirement requirements.lock
	@echo "set-up 4/4: the companion itself"
	@$(RUN) -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	@touch $@

test: $(VENV)/installed
	$(RUN) -m pytest

test-gpu: $(VENV)/installed
	$(RUN) -m pytest -m gpu -rs -s

test-slow: $(VENV)/installed
	$(RUN) -m pytest -m slow -rs

bench: $(VENV)/installed
	for name in guides trainer verifier; do $(RUN) tools/bench.py $$name || exit 1; done

reproduce: $(VENV)/installed
	$(RUN) -m sage_lib.reproduce --profile $(PROFILE) $(if $(RESUME),--resume)

lab: $(VENV)/installed
	$(VENV)/bin/jupyter lab --notebook-dir=notebooks

lock: $(VENV)/installed
	$(RUN) tools/lock.py

gpu: $(VENV)/installed
	$(RUN) -m pip install --disable-pip-version-check --constraint requirements.lock --no-deps $$($(RUN) -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["gpu"])')

smollm: $(VENV)/installed
	$(RUN) -m pip install --quiet --disable-pip-version-check --no-deps $$($(RUN) -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["smollm"])')

clean:
	rm -rf $(VENV)
