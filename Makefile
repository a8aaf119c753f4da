# `make quickstart` and `make test` set up what they need; see CONTRIBUTING.md.
EXTRA ?= cpu
export PYTHON EXTRA
# Set-up leaves byte-compiling to the first import; without caches every process would compile PyTorch anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup setup-games quickstart test lint unit simulation integration e2e simulate resume-test smoke clean

help: ## Show these targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: ## Make .venv from the lock file (EXTRA=gpu for a GPU machine, PYTHON=... to name the interpreter)
	@scripts/setup.sh $(EXTRA)

setup-games: setup ## Add TextWorld and ALFWorld's original engine, which are compiled: minutes
	@scripts/setup_games.sh

quickstart: setup ## Train a small agent on this machine's CPU, from nothing to runs/quickstart/summary.json
	@.venv/bin/asyncrl quickstart

test: setup-games ## All checks: lint, unit, simulation, integration, e2e
	@scripts/test.sh lint unit simulation integration e2e

lint: setup ## ruff, mypy and the floors
	@scripts/test.sh lint

unit: setup ## Unit tests: a minute, hardly any process
	@scripts/test.sh unit

simulation: setup ## 5,000 random schedules of the asynchronous loop, with deaths, under a virtual clock: minutes
	@scripts/test.sh simulation

integration: setup ## Real Ray, vLLM and DeepSpeed on the CPU: minutes
	@scripts/test.sh integration

e2e: setup ## Whole runs from the command line: minutes
	@scripts/test.sh e2e

simulate: setup ## 100,000 random schedules of the asynchronous loop, with deaths, under a virtual clock
	@.venv/bin/python -m tests.simulation --schedules 100000

resume-test: setup ## Kill a run at ten moments, resume it each time, and check that nothing was lost or trained twice
	@HF_HUB_OFFLINE=1 DS_ACCELERATOR=cpu .venv/bin/pytest -m slow tests/e2e/test_resume.py

smoke: setup ## Short runs: Search QA's sample, every environment whose data is here by both methods; tens of minutes
	@HF_HUB_OFFLINE=1 DS_ACCELERATOR=cpu .venv/bin/pytest -m slow tests/e2e/test_searchqa.py tests/e2e/test_environments.py

clean: ## Remove the environment and caches; runs/ stays
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .import_linter_cache *.egg-info build
