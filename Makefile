# Nine verbs: check, test, nightly, bench, studies, golden, wheel, device, docs. And the demo. Each sets up what it needs in .venv.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
NATIVE := CMakeLists.txt $(wildcard native/*/*.[ch]pp native/bindings/*.txt)

# Compiled modules are stored even where the environment forbids it: hundreds of processes of the tests read them.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo test nightly check bench studies golden wheel device docs fuzz libfuzzer clean

demo: $(VENV)/.installed
	$(BIN)/shrinkpoint-lab demo

# In three processes on two cores, a file in one of them, in the order of tests/conftest.py: tests of several ranks, and those
# that start programs, wait for a third of their time. More cores: make test WORKERS=9
WORKERS ?= 3
PYTEST := $(BIN)/python -m pytest -q -n $(WORKERS) --dist loadfile --no-loadscope-reorder

test: $(VENV)/.installed
	$(PYTEST)

# What takes too long for every change: long matrices of ranks, real kills in the middle of saves, sanitizers, installs of a release.
nightly: $(VENV)/.release $(VENV)/.rollouts
	$(PYTEST) -m nightly --durations 15

check: $(VENV)/.installed
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python release/budgets.py

bench: $(VENV)/.bench
	$(BIN)/python -m benchmarks.lossless.series
	$(BIN)/python -m benchmarks.lossless.run
	$(BIN)/python -m benchmarks.comparison.run
	$(BIN)/python -m benchmarks.frameworks.run
	$(BIN)/python benchmarks/crash_recovery.py

# Of the papers' tables: days on two cores, resumable (python -m lab.studies --list says how many minutes each takes).
# make studies QUICK=1: the same code on toys or on parts, half an hour.
studies: $(VENV)/.bench
	$(BIN)/python -m lab.studies $(if $(QUICK),--quick)

# The only thing that may write to tests/golden. It refuses to change a file that is there.
golden: $(VENV)/.installed
	$(BIN)/python tests/golden/make.py

# A release in dist/: the source distribution, and wheels for both processors of Linux and the Pythons that are found here.
wheel: $(VENV)/.release
	$(BIN)/python release/build.py --machine x86_64 --machine aarch64

# What a machine with a GPU and Python 3.12 or newer needs to measure everything without network: this folder, with a wheel in dist/.
device: $(VENV)/.release
	$(BIN)/python release/build.py --abi3
	@echo "Copy this folder, with dist/, to a machine with a GPU. There, in it:"
	@echo "  python benchmarks/device_all.py --out results/device-quick --quick"
	@echo "  python benchmarks/device_all.py --out results/device --seconds 480"

# The site of the documents, in build/site: open build/site/index.html. A warning is an error; --quiet would hide it and pass.
docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# An editable install: the Python sources are used where they stand, and the native core is built again when it changes.
# torch comes first and pinned: what it would bring along by itself is gigabytes of CUDA.
$(VENV)/.installed: pyproject.toml lab/pyproject.toml release/build-requirements.txt release/torchtitan-requirements.txt $(NATIVE)
	@echo "1 of 4: an environment in $(VENV), with pip"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/pip install --quiet --upgrade pip
	@echo "2 of 4: torch, the largest download"
	@$(BIN)/pip install --progress-bar on torch==2.13.0
	@echo "3 of 4: what builds the native core"
	@$(BIN)/pip install --quiet --requirement release/build-requirements.txt
	@echo "4 of 4: the native core, which is compiled, and what the tests need: some minutes"
	@$(BIN)/pip install --progress-bar on --no-build-isolation --editable ".[dev]" --editable lab
	@$(BIN)/pip install --quiet --no-deps --requirement release/torchtitan-requirements.txt || \
		echo "torchtitan cannot be installed: its tests will be skipped"
	@touch $@

$(VENV)/.release: $(VENV)/.installed release/requirements.txt
	$(BIN)/pip install --quiet --requirement release/requirements.txt
	touch $@

# vLLM and verl, in an environment behind which .venv lies: what they pin is theirs, all else and this package is shared.
# torchvision and its like are builds for CUDA, which torch for the CPU cannot load; transformers does without them.
ROLLOUTS := $(VENV)/rollouts
$(VENV)/.rollouts: $(VENV)/.installed release/rollouts-requirements.txt
	@$(PYTHON) -m venv $(ROLLOUTS)
	@$(BIN)/python -c "import sysconfig; print(f'import site; site.addsitedir({sysconfig.get_path(\"purelib\")!r})')" \
		> $$($(ROLLOUTS)/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/zz_shared.pth
	@($(ROLLOUTS)/bin/pip install --quiet --requirement release/rollouts-requirements.txt && \
		$(ROLLOUTS)/bin/pip install --quiet --no-deps verl==0.9.1 && \
		$(ROLLOUTS)/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec) || \
		(rm -rf $(ROLLOUTS) && echo "vLLM cannot be installed: its tests will be skipped")
	@touch $@

$(VENV)/.docs: $(VENV)/.installed
	$(BIN)/pip install --quiet --no-build-isolation --editable ".[dev,docs]"
	touch $@

$(VENV)/.bench: $(VENV)/.installed
	$(BIN)/pip install --quiet --no-build-isolation --editable ".[dev,bench]"
	touch $@

# The native core under sanitizers, fed with valid streams and with mutants of them: make fuzz SECONDS=600 SEED=7
SECONDS ?= 60
SEED ?= 1
FUZZ := build/fuzz
FUZZ_FLAGS := -std=gnu++17 -O1 -g -ffp-contract=off -Wall -Wextra -Wno-maybe-uninitialized -pthread -Inative \
  -fsanitize=address,undefined -fno-sanitize-recover=all
FUZZ_SOURCES := $(filter-out native/bindings/% %/buffer_pool.cpp,$(wildcard native/*/*.cpp))
FUZZ_OBJECTS := $(FUZZ_SOURCES:native/%.cpp=$(FUZZ)/objects/%.o)

fuzz: $(FUZZ)/fuzz
	$(FUZZ)/fuzz $(SECONDS) $(SEED)

$(FUZZ)/fuzz: $(FUZZ_OBJECTS)
	$(CXX) $(FUZZ_FLAGS) $^ -o $@

$(FUZZ)/objects/%.o: native/%.cpp $(wildcard native/*/*.hpp)
	@mkdir -p $(@D)
	$(CXX) $(FUZZ_FLAGS) -c $< -o $@

# The same under libFuzzer, which finds its way by what the core does with an input: make libfuzzer TARGET=chunks SECONDS=600
# TARGET: chunks, codes, lattice or wire. What it finds grows in CORPUS, which begins with the inputs of the tests.
# It needs clang: apt-get install clang (or clang-14 libclang-rt-14-dev). Without it, nothing is run.
CLANG ?= $(firstword $(foreach one,clang++ $(foreach n,22 21 20 19 18 17 16 15 14,clang++-$(n)),$(shell command -v $(one))))
TARGET ?= chunks
LIBFUZZER := build/libfuzzer
CORPUS ?= $(LIBFUZZER)/corpus/$(TARGET)
LIBFUZZER_FLAGS := -std=gnu++17 -O1 -g -ffp-contract=off -Wall -Wextra -pthread -Inative \
  -fsanitize=fuzzer,address,undefined -fno-sanitize-recover=all -DSHRINKPOINT_LIBFUZZER
LIBFUZZER_OBJECTS := $(patsubst $(FUZZ)/%,$(LIBFUZZER)/%,$(FUZZ_OBJECTS))

ifeq ($(CLANG),)
libfuzzer:
	@echo "libfuzzer: there is no clang here, so nothing was run; apt-get install clang, then again. \`make fuzz\` needs g++ only."
else
libfuzzer: $(LIBFUZZER)/fuzz
	@mkdir -p $(CORPUS) $(LIBFUZZER)/found
	SHRINKPOINT_FUZZ=$(TARGET) $(LIBFUZZER)/fuzz -max_total_time=$(SECONDS) -seed=$(SEED) -timeout=120 -max_len=4096 -len_control=0 \
	  -print_final_stats=1 -artifact_prefix=$(LIBFUZZER)/found/ $(CORPUS) $(wildcard tests/native/corpus/$(TARGET))
endif

$(LIBFUZZER)/fuzz: $(LIBFUZZER_OBJECTS)
	$(CLANG) $(LIBFUZZER_FLAGS) $^ -o $@

$(LIBFUZZER)/objects/%.o: native/%.cpp $(wildcard native/*/*.hpp)
	@mkdir -p $(@D)
	$(CLANG) $(LIBFUZZER_FLAGS) -c $< -o $@

clean:
	rm -rf $(VENV) build dist results runs
