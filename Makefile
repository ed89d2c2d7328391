# Every target sets up what it needs in .venv and writes nothing outside the checkout.
# The set-up runs again only when setup.py or pyproject.toml changed, or the checkout was moved.

PYTHON ?= python3
# The build of TensorFlow is one of the extras: EXTRAS=tf,tune,dev takes the one for GPUs.
EXTRAS ?= cpu,tune,dev
# Further arguments: make train ARGS=--config.training.epochs=3, make test ARGS="-k seeds"
ARGS ?=

BIN := .venv/bin
STAMP := .venv/.installed
TYPED := .venv/typed

# Keras and matplotlib would write to the home folder, and read settings that are there.
export KERAS_HOME := $(CURDIR)/.venv/keras
export MPLCONFIGDIR := $(CURDIR)/.venv/matplotlib
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PIP_NO_CACHE_DIR := 1

CHECK_VERSION := import sys; v = sys.version_info[:2]; \
  sys.exit(0 if (3, 10) <= v <= (3, 13) else "tfwd needs Python 3.10 to 3.13, and " + \
  sys.executable + " is %d.%d; run make distclean and name another: make PYTHON=python3.12" % v)

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup train sweep test lint clean distclean

help: ## print this
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "make %-10s %s\n", $$1, $$2}' Makefile

setup: $(STAMP) ## install tfwd and its tools into .venv (every target does so by itself)

train: $(STAMP) ## train the quickstart language model into runs/quickstart
	$(BIN)/tfwd-train --config=configs/quickstart.py --workdir=runs/quickstart $(ARGS)

sweep: $(STAMP) ## search for two dropout rates of a short run, into runs/sweep
	$(BIN)/tfwd-tune --config=configs/quickstart.py --config.training.epochs=2 \
	  --sweep=configs/sweeps/small.py --workdir=runs/sweep $(ARGS)

# A worker for each core, but no more than four: each holds a TensorFlow of its own.
test: $(STAMP) ## run the tests
	$(BIN)/pytest -n auto --maxprocesses 4 $(ARGS)

# mypy is shown the packages under their installed names, for which it has no other way.
lint: $(STAMP) ## check style, format and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@rm -rf $(TYPED) && mkdir -p $(TYPED)/tfwd
	@ln -s "$(CURDIR)"/tfwd/* "$(CURDIR)/layers" "$(CURDIR)/optimizers" $(TYPED)/tfwd
	cd $(TYPED) && ../bin/mypy --config-file ../../pyproject.toml --cache-dir ../../.mypy_cache -p tfwd

clean: ## remove caches and builds; .venv and runs stay
	rm -rf build dist ./*.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache $(TYPED)
	find . -name .venv -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean ## remove .venv too
	rm -rf .venv

# The stamp holds the checkout's path, because a virtual environment that was moved does not work.
ifneq ($(shell cat $(STAMP) 2>/dev/null),$(CURDIR))
$(STAMP): FORCE
endif
FORCE:

# The stamp is written last, so a set-up that failed half way leaves none. A .venv without pip is what
# stays when a system has no ensurepip; it is made anew, as one that was moved.
$(STAMP): setup.py pyproject.toml
	@if [ -e $@ ] && [ "$$(cat $@)" != "$(CURDIR)" ] || ! $(BIN)/python -m pip -V >/dev/null 2>&1; \
	then \
	  command -v "$(PYTHON)" >/dev/null || { \
	    echo "there is no $(PYTHON); name another: make PYTHON=python3.12" >&2; exit 1; }; \
	  "$(PYTHON)" -c '$(CHECK_VERSION)' && "$(PYTHON)" -m venv --clear .venv; \
	fi
	@$(BIN)/python -c '$(CHECK_VERSION)'
	@echo "installing tfwd[$(EXTRAS)] into .venv (on the first time some minutes)"
	@$(BIN)/python -m pip install --quiet --editable '.[$(EXTRAS)]'
	@printf '%s\n' "$(CURDIR)" > $@
