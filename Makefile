# `make demo` and `make test` need nothing but Python >= 3.11 and make: the first target that runs
# creates .venv and installs the exact versions of constraints.txt into it, each file checked against
# the hashes of requirements.lock. torch alone is not: which build is right the machine decides.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
BASE   := $(VENV)/.base
PIP    := $(BIN)/pip install --quiet --disable-pip-version-check
# Check the browser's scripts, by node where it is.
TYPESCRIPT := 5.9.3
PRETTIER   := 3.10.1
TORCH  := $(shell sed -n '/^torch==/p' constraints.txt)

.PHONY: help demo demo-record test test-fast coverage lint fmt docs screenshots docs-site lock bench record-h200 clean
.DEFAULT_GOAL := help

help: ## Show this list
	@sed -n 's/^\([a-z0-9-]*\):.*## \(.*\)/make \1	\2/p' $(MAKEFILE_LIST) | expand -t 20

demo: $(BASE) ## Analyse a real recording of a slow training run (installs no PyTorch)
	@$(BIN)/advisor demo
	@printf '\nNext, with your own trace, or with that one:\n  %s\n' \
	  "$(BIN)/advisor analyze sample_workloads/recordings/loader_before.json.gz"
	@printf '". %s/bin/activate" makes that "advisor analyze" in this shell.\n' "$(VENV)"
	@test -e $(STAMP) || printf '%s\n  %s\n' \
	  'Not installed here: recording, the dashboard and the tools of agents. They need:' \
	  '$(BIN)/pip install -e ".[record,dashboard,mcp]"'

demo-record: $(STAMP) ## Record a short training run on this machine and analyse it
	@$(BIN)/advisor demo --record

# The tests start programs by the dozen: with compiled files kept, each starts a second sooner.
test test-fast: export PYTHONDONTWRITEBYTECODE =
# worksteal: a worker that is done takes over tests from one that got the long ones.
test: $(STAMP) ## Run the tests on all cores (ARGS="-k name" is passed to pytest)
	$(BIN)/pytest -n auto --dist worksteal $(ARGS)

FAST := tests/test_imports.py tests/core tests/lint tests/render tests/rules

test-fast: $(STAMP) ## Run the tests of core, lint, rules and render that start no program
	$(BIN)/pytest -n auto --dist worksteal -m "not slow and not timed" $(FAST) $(ARGS)

# A report is made of failed tests too: what they executed, they executed.
coverage: $(STAMP) ## Run the tests as test does, and list the lines that none executes
	$(BIN)/coverage erase
	status=0; $(BIN)/coverage run -m pytest -n auto --dist worksteal $(ARGS) || status=$$?; \
	  $(BIN)/coverage combine --quiet && $(BIN)/coverage report && exit $$status

lint: $(STAMP) ## Check style, formatting and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict -p advisor
	@command -v npm >/dev/null 2>&1 || { echo "the timeline's scripts are not checked: no npm here"; exit 0; }; \
	  npx --yes --package typescript@$(TYPESCRIPT) tsc --project tools/jsconfig.json \
	  && npx --yes prettier@$(PRETTIER) --print-width 100 --check "dashboard/assets/**/*.js"

fmt: $(STAMP) ## Format the code and apply the safe fixes
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(STAMP) ## Write the generated pages of docs/: rules, commands, recording, schemas, Python, workloads
	$(BIN)/python docs/generate.py

screenshots: $(STAMP) ## Take the docs' pictures of the dashboard anew (needs Playwright and Chromium)
	$(BIN)/python docs/screenshots.py docs/screenshots sample_workloads/recordings/loader_before.json.gz $(ARGS)

docs-site: $(STAMP) ## Build the docs as a site in site/; broken links fail
	$(BIN)/mkdocs build --strict --quiet

lock: $(STAMP) ## Write requirements.lock after a change of constraints.txt (needs uv)
	$(BIN)/python tools/lock.py

bench: $(STAMP) ## Measure speed and memory (benchmarks/)
	@for file in benchmarks/bench_*.py; do \
	  echo "== $$file"; $(BIN)/python "$$file" $(ARGS) || exit 1; \
	done

record-h200: $(STAMP) ## Record the sample workloads on this machine's CUDA GPU (25 minutes)
	$(BIN)/python benchmarks/record_gpu.py --output tests/data/h200 $(ARGS)

clean: ## Remove what make, builds and tests left behind
	rm -rf $(VENV) site build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(BASE): pyproject.toml requirements-base.lock
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "advisor needs Python 3.11 or newer, $(PYTHON) is $$($(PYTHON) --version 2>/dev/null || echo missing); choose one with 'make PYTHON=python3.12 ...'" >&2; \
	  exit 1; }
	@test -x $(BIN)/pip || $(PYTHON) -m venv --clear $(VENV)
	$(PIP) --require-hashes --no-deps -r requirements-base.lock
	$(PIP) --no-deps --no-build-isolation -e .
	@touch $@

$(STAMP): $(BASE) constraints.txt requirements.lock
	$(PIP) --require-hashes --no-deps -r requirements.lock
	$(PIP) -c constraints.txt $(TORCH)
	@touch $@
