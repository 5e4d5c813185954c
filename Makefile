# `make help` lists the targets. All of them work in .venv, which `make setup` makes and every other target asks for.

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.setup-done
UV_VERSION := 0.13.9
INSTALL = $(BIN)/uv pip install --python $(BIN)/python --no-deps
COMPILE = $(BIN)/uv pip compile --universal --no-annotate --no-header --python-version 3.11 \
	--override requirements/overrides.txt $(PINFLAGS)

# The stamp holds the Python version that .venv was made for. It is removed before anything else and written last, so an
# environment without it was interrupted. Such a one, one whose interpreter is gone or has become another version, and
# one of another version than PYTHON asks for are rebuilt; after a change of the inputs alone, .venv is brought up to date.
version_of = $(shell $(1) -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)
made_for := $(shell cat $(STAMP) 2>/dev/null)
runs := $(filter $(made_for),$(call version_of,$(BIN)/python))
asked_for := $(if $(PYTHON),$(filter 3.11 3.12 3.13,$(call version_of,$(PYTHON))))
rebuild := $(if $(runs),$(filter-out $(made_for),$(asked_for)),yes)

# The largest wheel has several hundred MB, which a slow line does not bring within uv's default of 30 s.
export UV_HTTP_TIMEOUT ?= 600

.DEFAULT_GOAL := help
.PHONY: help setup python test test-long lint format demo wheel pins clean FORCE

help: ## List the targets
	@echo "Usage: make TARGET [PYTHON=path to Python 3.11 to 3.13] [ARGS='arguments for pytest']"
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  \1\t\2/p' $(firstword $(MAKEFILE_LIST)) | expand -t 14

setup: $(STAMP) ## Make .venv with the pinned packages and kvcompile itself, editable; does nothing when up to date

$(STAMP): Makefile pyproject.toml $(wildcard requirements/*.txt) packaging/vllm-alias/pyproject.toml $(if $(rebuild),FORCE)
	@rm -f $@
	@$(if $(rebuild),python=$$($(SHELL) packaging/find-python.sh $(PYTHON)) && \
		echo "Making $(VENV) with $$python" && rm -rf $(VENV) && "$$python" -m venv $(VENV))
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check uv==$(UV_VERSION)
	@$(INSTALL) --only-binary :all: -r requirements/dev.txt -r requirements/model.txt
	@$(INSTALL) --no-build-isolation ./packaging/vllm-alias --editable .
	@$(BIN)/python -c 'import sys; print("%d.%d" % sys.version_info[:2])' > $@.part && mv $@.part $@

python: ## Print the interpreter that `make setup` makes .venv with
	@$(SHELL) packaging/find-python.sh $(PYTHON)

test: $(STAMP) ## Run the tests, all but those marked long
	@$(BIN)/pytest -m "not long" $(ARGS)

test-long: $(STAMP) ## Run the tests marked long
	@$(BIN)/pytest -m long $(ARGS)

lint: $(STAMP) ## Check style and format
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

format: $(STAMP) ## Put right what lint complains of, where that can be done mechanically
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

demo: $(STAMP) ## Run the demo: a real model on vLLM's CPU build
	@$(BIN)/kvcompile demo

wheel: $(STAMP) ## Build dist/kvcompile-*.whl
	@rm -rf build
	@$(BIN)/python -m build --wheel --no-isolation

pins: $(STAMP) ## Resolve requirements/*.in anew, keeping versions that still fit (PINFLAGS=--upgrade: the newest)
	@$(COMPILE) --quiet requirements/cpu.in --output-file requirements/cpu.txt
	@$(COMPILE) --quiet requirements/dev.in --constraint requirements/cpu.txt --output-file requirements/dev.txt

clean: ## Remove build products and caches; .venv stays
	@rm -rf build dist *.egg-info packaging/vllm-alias/build packaging/vllm-alias/*.egg-info .pytest_cache .ruff_cache
	@find . -path ./$(VENV) -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +
