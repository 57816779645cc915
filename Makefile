# make demo  sets up .venv and runs the whole pipeline on an example;  make test  sets up and runs every test.
# Both install what they need into .venv: nothing else is changed on the machine (but as root, tests/cluster installs Slurm and Open MPI).

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3
TORCH ?= torch==2.13.0
TESTS ?= tests
BIN := .venv/bin
PIP := $(BIN)/python -m pip install -qq --disable-pip-version-check
OUT := demo-out
PREFIX ?= /usr/local
DESTDIR ?=

# Exits with 0 if this Python has a supported torch; looks at metadata only, importing torch takes seconds.
HAS_TORCH := from importlib.metadata import version; v = version("torch").split("."); \
  raise SystemExit(not (2, 11) <= (int(v[0]), int(v[1])) < (2, 15))

# Lines of a .pth file: the folders with packages of the Python that runs it.
OVER := import sys; print(*(f"import site; site.addsitedir({path!r})" for path in sys.path if path.endswith("-packages")), sep="\n")
FRAMEWORKS := $(patsubst tests/frameworks/requirements/%.txt,%,$(wildcard tests/frameworks/requirements/*.txt))

.PHONY: help demo test test-frameworks lint man completions bench install uninstall clean

help: ## this list
	@sed -n 's/^\([a-z -]*\):.*## /make \1: /p' Makefile

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "$(PYTHON) is not Python 3.11 or later; make PYTHON=python3.11" >&2; exit 1; }
	@if $(PYTHON) -c '$(HAS_TORCH)' 2>/dev/null; then site=--system-site-packages; else site=; fi; \
	echo "setup: creating .venv$${site:+ with $$site}"; \
	$(PYTHON) -m venv $$site .venv >/dev/null \
	  || { rm -rf .venv; echo "cannot create .venv; on Debian: apt install python3-venv" >&2; exit 1; }

.venv/.installed: setup.cfg pyproject.toml | $(BIN)/python
	@if $(BIN)/python -c '$(HAS_TORCH)' 2>/dev/null; then echo "setup: torch is there already"; \
	else echo "setup: installing $(TORCH) (the longest step: minutes)"; $(PIP) "$(TORCH)"; fi
	@echo "setup: installing prism-tools and what it needs"
	@$(PIP) -e .
	@touch $@

.venv/.installed-test: .venv/.installed
	@echo "setup: installing the test tools"
	@$(PIP) -e '.[test]'
	@touch $@

demo: .venv/.installed ## run the whole pipeline on share/prism/examples/gpt.py; report and picture in demo-out/
	@mkdir -p $(OUT)
	@echo "demo 1/6: record 8 ranks of a small paced GPT (TP 2, PP 2, DP 2), 2 running at a time"
	@$(BIN)/prism-record -n 8 -j 2 -o $(OUT)/bare.h5 -- share/prism/examples/gpt.py --tp 2 --pp 2 --layers 2 --microbatches 2 --pace 20 --steps 6 > $(OUT)/program.log
	@echo "demo 2/6: slice: measure 2 ranks at a time, against virtual peers"
	@$(BIN)/prism-slice $(OUT)/bare.h5 -s 2 -o $(OUT)/sliced.h5
	@echo "demo 3/6: calibrate: solve one timeline of all 8 ranks"
	@$(BIN)/prism-calibrate $(OUT)/sliced.h5 -o $(OUT)/calibrated.h5
	@echo "demo 4/6: replay ranks 0-1 for real among 6 virtual ranks"
	@$(BIN)/prism-replay -r 0-1 $(OUT)/calibrated.h5 -o $(OUT)/replayed.h5
	@echo "demo 5/6: draw the timeline: $(OUT)/timeline.png"
	@$(BIN)/prism-inspect timeline $(OUT)/calibrated.h5 -o $(OUT)/timeline.png
	@echo "demo 6/6: the report"
	@$(BIN)/prism-inspect summary $(OUT)/replayed.h5

test: .venv/.installed-test ## run every test (TESTS=tests/cli: only those)
	@echo "test: running $(TESTS)"
	@$(BIN)/python -m pytest $(TESTS)

# In environments of their own over the packages of .venv, so that they share its torch; two frameworks at a time.
test-frameworks: $(FRAMEWORKS:%=.venv/frameworks/%/.installed) ## run programs of Transformers, Lightning, DeepSpeed, Megatron, torchtitan
	@$(MAKE) --no-print-directory -j2 --output-sync=target $(FRAMEWORKS:%=test-framework-%)

test-framework-%: .venv/frameworks/%/.installed
	@echo "test-frameworks: $*"
	@.venv/frameworks/$*/bin/python -m pytest -p no:cacheprovider tests/frameworks

.venv/frameworks/%/.installed: tests/frameworks/requirements/%.txt | .venv/.installed-test
	@echo "setup: installing $*, for make test-frameworks"
	@rm -rf $(@D); $(BIN)/python -m venv --without-pip $(@D)
	@$(BIN)/python -c '$(OVER)' > "$$($(@D)/bin/python -c 'import site; print(site.getsitepackages()[0])')/venv.pth"
	@$(BIN)/python -m pip --python $(@D)/bin/python install -qq --disable-pip-version-check --no-compile -r $<
	@touch $@

lint: .venv/.installed-test ## check style, types, shell scripts, man pages and completions
	@echo "lint: ruff"
	@$(BIN)/ruff check --quiet .
	@$(BIN)/ruff format --quiet --check . || { echo "not formatted; run $(BIN)/ruff format" >&2; exit 1; }
	@echo "lint: mypy"
	@$(BIN)/mypy --no-error-summary
	@echo "lint: shellcheck"
	@$(BIN)/shellcheck .ci/run $(wildcard slurm/*.sh slurm/*.sbatch)
	@echo "lint: man pages and completions are current"
	@$(BIN)/python share/generate.py --check

man completions: .venv/.installed-test ## write them from the tools' parsers
	@echo "$@: writing from prism_tools/cli"
	@$(BIN)/python share/generate.py $@

bench: .venv/.installed-test ## run tests/bench/NAME.py (BENCH=NAME); it prints JSON lines
	@test -f "tests/bench/$(BENCH).py" || { echo "no tests/bench/$(BENCH).py; make bench BENCH=NAME" >&2; exit 1; }
	@$(BIN)/python tests/bench/$(BENCH).py

# $(PYTHON)'s torch is used if it has one; nothing of this folder is needed afterwards.
install uninstall: ## the tools below PREFIX=/usr/local (staged in DESTDIR=); uninstall removes exactly that
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "$(PYTHON) is not Python 3.11 or later; make $@ PYTHON=python3.11" >&2; exit 1; }
	@$(PYTHON) share/install.py $@ --prefix "$(PREFIX)" --destdir "$(DESTDIR)" --torch "$(TORCH)"

clean: ## remove what make made, except .venv
	rm -rf $(OUT) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -path ./.venv -prune -o -name __pycache__ -type d -exec rm -rf {} +
