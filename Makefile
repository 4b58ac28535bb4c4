# PocketLLM: `make run` serves a model through Triton, `make test` checks everything.
# Variables: PYTHON (3.11 or 3.12), MODEL, BACKEND, ONCE, HTTP_PORT, GRPC_PORT, METRICS_PORT, PYTEST_ARGS.
SHELL := /bin/sh
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip --disable-pip-version-check --quiet
CPP_BUILD := build/cpp-release
CPP_SOURCES := $(shell find cpp_engine -name '*.cpp' -o -name '*.h' -o -name CMakeLists.txt)
CPP_STYLED := $(filter %.cpp %.h,$(CPP_SOURCES))

.PHONY: help run test sanitizers fuzz test-slow browser-test lint format types cpp-test py-test py-test-library py-test-serving bench bench-smoke perf-analyzer locust chart deploy-test docker-test wheel lock sbom clean

help:
	@echo "make run    [ONCE=1] [MODEL=/path] [BACKEND=torch] [HTTP_PORT=8000 GRPC_PORT=8001 METRICS_PORT=8002]"
	@echo "make test   lint, types, C++ tests, Python tests, Triton end to end"
	@echo "make sanitizers | fuzz   C++ tests under ASan, UBSan and TSan; fuzzers for FUZZ_SECONDS each (needs Clang)"
	@echo "make chart | deploy-test   Helm: render the chart's manifests; lint and validate it"
	@echo "make docker-test   Docker: build the images and try compose.yaml on a real engine"
	@echo "make wheel | sbom | lock   reproducible wheel, bills of materials, hashes of the images' requirements"
	@echo "make lint | format | bench | bench-smoke | perf-analyzer | locust | test-slow | browser-test | clean"

# --- environment: each stamp is newer than what it was made from -------------------------------

$(VENV)/bin/python:
	@python=$$(tools/find_python.sh) && echo "creating $(VENV) with $$python" && \
	"$$python" -m venv $(VENV)

$(VENV)/.run: requirements/run.txt requirements/demo.txt | $(VENV)/bin/python
	@echo "installing the runtime: Triton server, demo model, build tools"
	@$(PIP) install --no-warn-conflicts -r requirements/run.txt && $(PIP) install --no-deps -r requirements/demo.txt
	@touch $@

$(VENV)/.torch: requirements/torch.txt $(VENV)/.run
	@echo "installing torch and transformers"
	@$(PIP) install --no-warn-conflicts -r requirements/torch.txt
	@touch $@

$(VENV)/.test: requirements/test.txt requirements/torch.txt $(VENV)/.run
	@echo "installing the test tools (with torch and transformers as oracles)"
	@$(PIP) install --no-warn-conflicts -r requirements/test.txt
	@touch $@

# Editable: Python is used from the checkout, the compiled engine from the environment. Built where
# the C++ tests are, so that what both need is compiled once.
$(VENV)/.engine: $(CPP_SOURCES) pyproject.toml $(VENV)/.run
	@tools/check_compiler.sh
	@echo "building the C++ engine"
	@$(PIP) install --no-build-isolation --no-deps --config-settings=build-dir=$(CPP_BUILD) --editable .
	@touch $@

# --- serving -------------------------------------------------------------------------------------

run: $(VENV)/.engine $(if $(filter torch,$(BACKEND)),$(VENV)/.torch)
	@exec $(BIN)/python -m pocket_backend.cli.main demo $(if $(ONCE),--once) \
	  $(if $(MODEL),--model "$(MODEL)") $(if $(BACKEND),--backend "$(BACKEND)") $(if $(HTTP_PORT),--http-port $(HTTP_PORT)) \
	  $(if $(GRPC_PORT),--grpc-port $(GRPC_PORT)) \
	  $(if $(METRICS_PORT),--metrics-port $(METRICS_PORT))

# --- checks --------------------------------------------------------------------------------------

# Types need one core for a minute, C++ tests the other one.
test: lint $(VENV)/.engine
	$(MAKE) --no-print-directory -j2 --output-sync=target types cpp-test
	$(MAKE) --no-print-directory py-test

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run -Werror $(CPP_STYLED)

types: $(VENV)/.test $(VENV)/.engine
	$(BIN)/mypy

cpp-test: $(VENV)/.test $(VENV)/.engine
	@tools/check_compiler.sh && tools/system_packages.sh
	$(BIN)/cmake -S cpp_engine -B $(CPP_BUILD) -G Ninja -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN)/ninja) \
	  -DPOCKET_BUILD_TESTS=ON -DPOCKET_BUILD_TOOLS=ON -Wno-dev >/dev/null
	$(BIN)/cmake --build $(CPP_BUILD)
	$(BIN)/ctest --test-dir $(CPP_BUILD) --output-on-failure

# The C++ tests, with the fuzz targets' corpora, under AddressSanitizer and UndefinedBehaviorSanitizer,
# and under ThreadSanitizer. Any report fails a test.
SANITIZERS := asan tsan
WITH_TOOLS := PATH="$(abspath $(BIN)):$$PATH"
sanitizers: $(VENV)/.run
	@tools/check_compiler.sh && tools/system_packages.sh
	@cd cpp_engine && for preset in $(SANITIZERS); do \
	  $(WITH_TOOLS) cmake --preset $$preset && $(WITH_TOOLS) cmake --build --preset $$preset && \
	  $(WITH_TOOLS) ctest --preset $$preset || exit 1; done

# Every fuzz target for FUZZ_SECONDS, one after the other; needs Clang. New inputs go to build/fuzz-TARGET.
FUZZ_SECONDS := 600
FUZZ_TARGETS := $(notdir $(wildcard tests/fuzz/corpus/*))
fuzz: $(VENV)/.run
	@command -v clang++ >/dev/null || { echo "No clang++: install clang 14 or newer (apt-get install clang)." >&2; exit 1; }
	@cd cpp_engine && $(WITH_TOOLS) cmake --preset fuzz && $(WITH_TOOLS) cmake --build --preset fuzz
	@for target in $(FUZZ_TARGETS); do \
	  mkdir -p build/fuzz-$$target build/fuzz-findings && \
	  build/cpp-fuzz/fuzz/fuzz_$$target -max_total_time=$(FUZZ_SECONDS) -timeout=25 -rss_limit_mb=1536 \
	    -print_final_stats=1 -artifact_prefix=build/fuzz-findings/$$target- \
	    build/fuzz-$$target tests/fuzz/corpus/$$target || exit 1; done

# Two processes, since those that serve wait for most of their time while the others compute. A
# selection in PYTEST_ARGS may leave one of them without a test (status 5).
py-test: $(VENV)/.test $(VENV)/.engine
	$(MAKE) --no-print-directory -j2 py-test-library py-test-serving

PYTEST = $(BIN)/python -m pytest -m "not slow and not docker"
NONE_SELECTED = $(if $(PYTEST_ARGS),|| [ $$? = 5 ])

py-test-library:
	$(PYTEST) tests --ignore=tests/triton --ignore=tests/gateway $(PYTEST_ARGS) $(NONE_SELECTED)

py-test-serving:
	$(PYTEST) tests/triton tests/gateway $(PYTEST_ARGS) $(NONE_SELECTED)

test-slow: $(VENV)/.test $(VENV)/.engine
	$(BIN)/python -m pytest -m "slow and not docker" $(PYTEST_ARGS)

$(VENV)/.browser: requirements/browser.txt $(VENV)/.test
	@echo "installing Playwright"
	@$(PIP) install --no-warn-conflicts -r requirements/browser.txt
	@touch $@

# The web console in Debian's chromium, which is installed if it is missing and we may.
browser-test: $(VENV)/.browser $(VENV)/.engine
	@tools/system_packages.sh --browser
	$(BIN)/python -m pytest -m browser tests/gateway $(PYTEST_ARGS)

$(VENV)/.clients: requirements/clients.txt tests/gateway/node/package-lock.json $(VENV)/.test
	@echo "installing LangChain, and openai for Node if npm is here"
	@$(PIP) install --no-warn-conflicts -r requirements/clients.txt
	@! command -v npm >/dev/null || npm ci --prefix tests/gateway/node --silent --no-audit --no-fund
	@touch $@

# Clients that are too big for `make test`; those that are not here are skipped.
.PHONY: client-test
client-test: $(VENV)/.clients $(VENV)/.engine
	$(BIN)/python -m pytest tests/gateway/test_openai_node.py tests/gateway/test_langchain.py $(PYTEST_ARGS)

format: $(VENV)/.test
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CPP_STYLED)

# --- benchmarks ----------------------------------------------------------------------------------

bench: $(VENV)/.engine
	$(BIN)/python -m perf.bench_scheduler
	$(BIN)/python -m perf.bench_engine

# Under two minutes: ratios of ours to references of the same run.
bench-smoke: $(VENV)/.engine
	$(BIN)/python -m perf.bench_smoke

# NVIDIA's perf_analyzer (installed into .cache) over gRPC and HTTP; fails if its counts are not the server's.
perf-analyzer: $(VENV)/.engine
	$(BIN)/python -m perf.analyzer $(ANALYZER_ARGS)

$(VENV)/.locust: requirements/locust.txt $(VENV)/.test
	@echo "installing Locust"
	@$(PIP) install --no-warn-conflicts -r requirements/locust.txt
	@touch $@

# A server, a gateway and Locust's users; fails if an objective is missed. LOCUST_ARGS: see perf/README.md.
locust: $(VENV)/.locust $(VENV)/.engine
	$(BIN)/python -m perf.locust $(LOCUST_ARGS)

# --- deployment ----------------------------------------------------------------------------------

# The chart's README table, its rules, and the manifests that the suite checks; needs Helm (37 MB).
chart: $(VENV)/.test
	$(BIN)/python tools/write_chart_files.py
	$(BIN)/python tools/render_chart.py

deploy-test: $(VENV)/.test $(VENV)/.engine
	@$(PIP) install -r requirements/deploy.txt
	$(BIN)/python tools/get_helm.py
	$(BIN)/python -m pytest tests/deploy -m "not slow" $(PYTEST_ARGS)

# The same bytes from the same sources: times in it are the last commit's.
wheel: $(VENV)/.run
	@tools/check_compiler.sh
	@$(BIN)/python tools/build_wheel.py dist

SUPPLY := .cache/supply-chain
$(SUPPLY)/.ready: requirements/supply-chain.txt | $(VENV)/bin/python
	@$(VENV)/bin/python -m venv $(SUPPLY) && $(SUPPLY)/bin/pip --quiet install -r requirements/supply-chain.txt
	@touch $@

# After changing a version in requirements/image-*.txt: the hashes that pip insists on.
lock: $(SUPPLY)/.ready
	$(SUPPLY)/bin/python tools/lock_requirements.py

# CycloneDX, one document for each image's Python environment and one for this checkout's.
sbom: $(SUPPLY)/.ready $(VENV)/.run
	@mkdir -p build/sbom
	@for file in $(wildcard requirements/image-*.txt); do \
	  $(SUPPLY)/bin/cyclonedx-py requirements --output-reproducible --of JSON \
	    -o build/sbom/$$(basename $$file .txt).cdx.json $$file || exit 1; done
	@$(SUPPLY)/bin/cyclonedx-py environment --output-reproducible --of JSON --pyproject pyproject.toml \
	  -o build/sbom/environment.cdx.json $(BIN)/python
	@ls build/sbom/*.json

# On the engine that DOCKER_HOST names, else on a private one (root on Debian: it is installed if missing).
docker-test: $(VENV)/.test $(VENV)/.engine
	@$(PIP) install -r requirements/docker.txt
	@[ -n "$$DOCKER_HOST" ] || $(BIN)/python tools/docker_engine.py install
	$(BIN)/python -m pytest tests/docker -m "" $(PYTEST_ARGS)

clean:
	rm -rf build $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis
