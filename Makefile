# Two commands: `make run` and `make test`. Both make .venv first, from the hash-checked lock.
# PYTHON: a Python 3.11 or 3.12 to make the environment with.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

export DVC_NO_ANALYTICS := 1
export OMP_NUM_THREADS := 1
# Where this is set, every process compiles anew what it imports: twelve of the thirty seconds of processor time of a
# short run. What is written lies in .venv and __pycache__, and costs nothing beforehand; to compile the whole lock while
# it is installed takes a hundred seconds and 450 MB, most of them for modules that nobody imports.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help run test test-slow test-services test-team crash-points golden soak life fuzz audit lint docs changelog lock clean

help:  ## show this
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

run: $(READY)  ## run the comparison of params.yaml (dvc repro) and show where its results are
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -P -m pipelines.cli.make_run

test: $(READY)  ## the default test suite
	@$(BIN)/python -m pytest -q

test-slow: $(READY)  ## tests that take minutes
	@$(BIN)/python -m pytest -q -m slow

test-services: $(READY)  ## tests that start real servers on loopback
	@$(BIN)/python -m pytest -q -m services -n 0

fuzz: $(READY)  ## thousands of configurations and artefacts that nobody would write (a quarter of an hour)
	@$(BIN)/python -m pytest -q -m slow tests/fuzz

audit: $(READY)  ## known vulnerabilities of the lock (make itself always ends with 2; `python infra/audit.py` has the exit codes)
	@$(BIN)/python infra/audit.py

# FAULTS: how many. SEED: of what is thrown when. LIFE: sequences of twenty steps.
FAULTS ?= 200
SEED ?= 0
LIFE ?= 40

crash-points: $(READY)  ## end, fill or break the disk at every operation (POINTS=60 SEED=7: some of them), and go on
	@$(BIN)/python tests/crash/points.py --seed $(SEED) $(if $(POINTS),--points $(POINTS)) \
		--out $(or $(OUT),artifacts)

soak: $(READY)  ## FAULTS faults at random moments of SEED around real commands and servers; what became of each
	@rm -rf artifacts/soak
	@$(BIN)/python -m tests.soak --faults $(FAULTS) --seed $(SEED) --out artifacts/soak

life: $(READY)  ## LIFE sequences of what may be done to run folders, at random from SEED; nothing may be lost
	@LIFE=$(LIFE) SEED=$(SEED) $(BIN)/python -m pytest -q -n 0 -m slow tests/pipelines/life

golden: $(READY)  ## every method on digits, against the hashes kept with the code (about a minute)
	@$(BIN)/python -P -m pipelines.cli reproduce --golden

test-team: $(READY) .venv-team/.ready .venv-store/.ready  ## the topology of infra/compose.yaml without containers; needs PostgreSQL
	@$(BIN)/python -m pytest -q -m services -n 0 tests/services/test_team.py

lint: $(READY)  ## formatting, lint and types
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy

docs: $(READY)  ## write the pages that the code declares, and build the site into site/
	@$(BIN)/python -m pipelines.cli.documentation
	@$(BIN)/python -m sphinx -W --keep-going -q -b html docs site
	@echo "site/index.html   (open it in a browser)"

changelog:  ## print the entries of changelog/ by kind, for a section of CHANGELOG.md
	@for kind in added changed removed fixed; do \
		cat changelog/*.$$kind.md 2>/dev/null | sed "1s/^/### $$kind\n\n/;\$$s/$$/\n/"; \
	done

# What is in a lock already stays; UPGRADE=1 takes the newest version of everything.
COMPILE = $(BIN)/uv pip compile --quiet --universal --no-header --generate-hashes $(if $(UPGRADE),--upgrade) --output-file

lock: $(READY)  ## bring the locks of infra/ up to pyproject.toml (UPGRADE=1: and every package to its newest version)
	@$(COMPILE) infra/requirements.lock --extra mlops --group dev pyproject.toml
	@$(COMPILE) infra/requirements-production.lock --extra ray --extra team --constraint infra/requirements.lock pyproject.toml
	@echo "moto[server]" | $(COMPILE) infra/requirements-store.lock -

clean:  ## remove the environment and everything computed; keeps params.yaml, dvc.lock and the DVC cache
	rm -rf $(VENV) .venv-* artifacts runs .prefect .protofl mlruns site

# uv installs the lock in half a minute; pip installs uv itself, at the version and with the hashes of the lock.
UV_OF_LOCK = sed -n '/^uv==/,/[^\\]$$/p' infra/requirements.lock

$(READY): infra/requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(0 if (3, 11) <= v < (3, 13) else "protofl needs Python 3.11 or 3.12, this is %d.%d; try: make PYTHON=python3.11 ..." % v)'
	@echo "making $(VENV) (once) ..."
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@test -x $(BIN)/uv || $(UV_OF_LOCK) | $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --require-hashes -r /dev/stdin
	@$(BIN)/uv pip sync --quiet --require-hashes --python $(BIN)/python infra/requirements.lock
	@$(BIN)/uv pip install --quiet --no-deps --no-build-isolation --python $(BIN)/python --editable .
	@touch $@

# What the image of infra/Dockerfile has, and a store that speaks S3: environments of their own for `make test-team`.
.venv-team/.ready: infra/requirements-production.lock $(READY)
	@$(BIN)/uv venv --quiet --clear --python $(BIN)/python .venv-team
	@$(BIN)/uv pip sync --quiet --require-hashes --python .venv-team/bin/python infra/requirements-production.lock
	@touch $@

.venv-store/.ready: infra/requirements-store.lock $(READY)
	@$(BIN)/uv venv --quiet --clear --python $(BIN)/python .venv-store
	@$(BIN)/uv pip sync --quiet --require-hashes --python .venv-store/bin/python infra/requirements-store.lock
	@touch $@
