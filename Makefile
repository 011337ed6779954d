# `make` alone lists what there is. Everything runs inside .venv, which `make setup` keeps up to date.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.segcal-setup
TEST_WORKERS ?= 2
# One thread a process: two test workers on two cores must not start two thread pools each.
ONE_THREAD := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1
# Tests of one file stay in one process, so that what a file sets up (a wheel, a fitted calibrator) is made once.
PYTEST := $(ONE_THREAD) $(BIN)/python -m pytest -n $(TEST_WORKERS) --dist loadfile
# What stands behind tables of docs/ and takes hours; the others measure speed and memory against targets.
EXPERIMENTS := $(patsubst %,benchmarks/%.py,classifier_scale classifiers digits digits_losses interval_coverage \
  qa_hippocampus row_intervals)
BENCHMARKS := $(filter-out benchmarks/_% $(EXPERIMENTS),$(wildcard benchmarks/*.py))
# Those that know a short form of themselves.
QUICK_BENCHMARKS := $(shell grep -l -e '"--quick"' $(BENCHMARKS))

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-all lint format bench bench-quick experiments chromium postgres viewer clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-11s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(STAMP) ## create .venv and install segcal with its development tools (only when something changed)

# The build backend comes from .venv as well (no isolation), so the constraints hold for it and a repeated setup needs no download.
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check --quiet -c constraints.txt 'setuptools>=77'
	$(BIN)/python -m pip install --disable-pip-version-check --quiet --no-build-isolation -c constraints.txt -e '.[dev,nnunet,dask,service]'
	@touch $@

demo: setup ## the whole flow on synthetic data, into demo_out/
	$(BIN)/segcal demo --out demo_out

lint: setup ## ruff (rules and format) and mypy --strict
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: setup ## rewrite the sources in the house format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

test: lint ## lint, then every test that is not marked slow
	$(PYTEST) -m "not slow"

test-all: lint ## lint, then every test
	$(PYTEST)

bench: setup ## speed and memory, one script after the other (about 25 minutes; 9 GB in the folder for temporary files)
	@set -e; for script in $(BENCHMARKS); do echo "== $$script"; $(BIN)/python "$$script"; done

experiments: setup ## what the tables on methods, losses, intervals and QA in docs/ come from (hours)
	@set -e; for script in $(EXPERIMENTS); do echo "== $$script"; $(BIN)/python "$$script"; done

bench-quick: setup ## those with a short form, on small data, in about a minute: shows that they run, not how fast
	@set -e; for script in $(QUICK_BENCHMARKS); do echo "== $$script"; $(BIN)/python "$$script" --quick; done

chromium: ## install chromium and its driver for the browser tests, if missing and you are root; never fails
	@if command -v chromium >/dev/null 2>&1 && command -v chromedriver >/dev/null 2>&1; then \
	  echo "chromium is here: $$(command -v chromium)"; \
	elif [ "$$(id -u)" != 0 ] || ! command -v apt-get >/dev/null 2>&1; then \
	  echo "chromium is missing; installing it needs root and apt-get. Tests that need it are skipped."; \
	else \
	  echo "chromium is missing: apt-get install -y chromium chromium-driver"; \
	  DEBIAN_FRONTEND=noninteractive apt-get install -y -q chromium chromium-driver </dev/null \
	    || { apt-get update -q </dev/null && DEBIAN_FRONTEND=noninteractive apt-get install -y -q chromium chromium-driver </dev/null; } \
	    || echo "chromium could not be installed. Tests that need it are skipped."; \
	fi

postgres: ## install a PostgreSQL server for the tests of the service, if missing and you are root; never fails
	@if ls /usr/lib/postgresql/*/bin/initdb >/dev/null 2>&1 || command -v initdb >/dev/null 2>&1; then \
	  echo "PostgreSQL is here"; \
	elif [ "$$(id -u)" != 0 ] || ! command -v apt-get >/dev/null 2>&1; then \
	  echo "PostgreSQL is missing; installing it needs root and apt-get. Tests that need it are skipped."; \
	else \
	  echo "PostgreSQL is missing: apt-get install -y postgresql"; \
	  DEBIAN_FRONTEND=noninteractive apt-get install -y -q postgresql </dev/null \
	    || { apt-get update -q </dev/null && DEBIAN_FRONTEND=noninteractive apt-get install -y -q postgresql </dev/null; } \
	    || echo "PostgreSQL could not be installed. Tests that need it are skipped."; \
	fi

viewer: setup ## bring NiiVue into the package for the service's pages, if npm is there; never fails
	@if command -v npm >/dev/null 2>&1; then \
	  $(BIN)/python -m segcal.service.web.build_viewer || echo "NiiVue could not be had. Pages show slices drawn by the server."; \
	else \
	  echo "npm is missing: the pages show slices drawn by the server."; \
	fi

clean: ## remove caches, builds and demo_out (not .venv)
	rm -rf build dist demo_out .mypy_cache .ruff_cache .pytest_cache .hypothesis *.egg-info
	find segcal cli configs tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
