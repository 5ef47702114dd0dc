# The vocabulary of the project. `make demo` and `make test` need nothing but git, make and the package registries.
PYTHON := .venv/bin/python
export PYTHONDONTWRITEBYTECODE ?= 1

.PHONY: help setup setup-test demo run test test-nightly lint bench bench-policies lab paper package clean

help: ## what each target does
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 18

setup: ## Debian packages for running, .venv, .venv/bin/prefetchd
	@packaging/setup.sh run
	@$(if $(filter setup,$(MAKECMDGOALS)),echo "setup: done; now: sudo .venv/bin/prefetchd doctor")

setup-test: ## the same and what the demo, the lab and the tests need
	@packaging/setup.sh test

demo: setup-test ## training jobs and a greedy reader in the lab guest, first without control, then with
	@$(PYTHON) -m tests.lab demo

run: setup ## the agent on this node (ARGS="--mode dry-run --config FILE")
	@.venv/bin/prefetchd run $(ARGS)

test: setup-test ## unit, native and lab tests, lint, types and import rules (<= 25 minutes on 2 cores)
	@$(PYTHON) -m pytest -m "not nightly and not guest" $(ARGS)

test-nightly: setup-test ## everything, the long runs included
	@$(PYTHON) -m pytest -m "not guest" --run-nightly $(ARGS)

lint: setup-test ## ruff, mypy and the import rules alone
	@$(PYTHON) -m pytest -q tests/unit/test_lint.py

bench: setup-test ## what the agent costs (ARGS="--json FILE")
	@$(PYTHON) -m tests.bench $(ARGS)

bench-policies: setup-test ## every policy on a real kernel in the lab guest, into out/ (about 70 minutes; ARGS="--seconds 40" for whole scenarios)
	@$(PYTHON) -m tests.lab bench --plan tests/lab/bench.toml --seconds 24 --json out/bench.json --report out/bench.html $(ARGS)

lab: setup-test ## a shell in the lab guest
	@$(PYTHON) -m tests.lab shell

paper: setup-test ## the source paper's testbed in the simulator, its figures beside ours (about 20 CPU minutes)
	@.venv/bin/prefetchd simulate --scenario paper --policy static,paper,adaptive --seed 1,2,3 $(ARGS)

package: setup-test ## one archive that installs without a network, in dist/
	@$(PYTHON) packaging/package.py $(ARGS)

clean: ## remove what the targets above made in this folder
	rm -rf .venv out build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
