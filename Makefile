# make quickstart   trains two adapters on a real model and real data, in three minutes
# make compare      the same for all methods, on more rows
# make test         lint, types, import layers and the quick tests: before each commit
# make sweep        the rest: every architecture, dtype, kernel configuration, notebook and page
# make docs         the documentation site, offline, in build/docs/html; make links follows its links
# make readme       what the README shows, in an environment with what the package declares
# make notebooks    runs the notebooks from top to bottom, and keeps what they print and draw
# make fuzz         random sequences of calls on tiny models: make fuzz ARGS="--minutes 10"
# make mutants      how many of 60 planted bugs the tests catch; takes an hour or two
# make bench        what adapters cost on this CPU, beside the base model and PEFT
# make bench-gpu    the same on a GPU, in 8 minutes; with its torch: make TORCH=torch bench-gpu
#
# Each makes the virtual environment when it is missing and needs only Python and make.
# To use another torch than the one CI tests:   make TORCH=torch quickstart

PYTHON ?= python3
VENV ?= .venv
WORKERS ?= 2
ARGS ?=

BIN := $(VENV)/bin
# no warning of conflicts: the packages of DATA come without the requirements they declare
PIP := -m pip --disable-pip-version-check --no-input -qq
INSTALL := $(BIN)/python $(PIP) install --no-warn-conflicts
PINNED_TORCH := $(shell grep '^torch==' constraints.txt)
TORCH ?= $(PINNED_TORCH)

# a torch of one's own brings its own triton, so neither pin may hold it back
UNPINNED := $(if $(filter $(PINNED_TORCH),$(TORCH)),^$$,^(torch|triton)==)
CONSTRAINTS := $(VENV)/constraints.txt
DATA := examples/data-requirements.txt

# content, not time: a fresh clone has fresh times; the version stands in the installed metadata
KEY := $(shell (cat pyproject.toml constraints.txt $(DATA); echo '$(TORCH)'; \
	grep '^__version__' adapterzoo/__init__.py) | cksum | cut -d ' ' -f 1)

.PHONY: help quickstart compare readme notebooks bench bench-gpu test sweep lint types floors figures \
	docs links tests sweeps coverage devices architectures fuzz mutants format clean
.NOTPARALLEL:
.DELETE_ON_ERROR:

help:
	@sed -n '/^$$/q; s/^# \{0,1\}//p' Makefile

# threads that wait without spinning: on cores that others use too, spinning costs most of the time
quickstart compare: export OMP_WAIT_POLICY = PASSIVE
quickstart: $(VENV)/.quickstart-$(KEY)
	@$(BIN)/python examples/quickstart.py $(ARGS)

compare: $(VENV)/.quickstart-$(KEY)
	@$(BIN)/python examples/quickstart.py --methods all --train-rows 3000 --test-rows 2000 --output runs/compare $(ARGS)

# a wheel, and beside it only what it declares
readme: $(VENV)/.test-$(KEY)
	rm -rf build/readme
	$(BIN)/python $(PIP) wheel --no-deps --no-build-isolation -w build/readme .
	$(BIN)/python -m venv build/readme/venv
	build/readme/venv/bin/python $(PIP) install --no-compile -c $(CONSTRAINTS) '$(TORCH)' build/readme/*.whl
	$(BIN)/python tests/run_readme.py build/readme/venv/bin/python

notebooks: export OMP_NUM_THREADS = 1
notebooks: $(VENV)/.docs-$(KEY)
	$(BIN)/python notebooks/execute.py $(ARGS)

bench: export OMP_NUM_THREADS = 1
bench: export HF_HUB_OFFLINE = 1
bench: $(VENV)/.bench-$(KEY)
	$(BIN)/python benchmarks/cpu.py $(ARGS)

bench-gpu: export HF_HUB_OFFLINE = 1
bench-gpu: $(VENV)/.bench-$(KEY)
	$(BIN)/python benchmarks/gpu.py $(ARGS)

test: lint types floors figures tests

sweep: docs readme sweeps

lint: $(VENV)/.test-$(KEY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.test-$(KEY)
	$(BIN)/mypy

floors: $(VENV)/.test-$(KEY)
	$(BIN)/lint-imports

figures: $(VENV)/.test-$(KEY)
	$(BIN)/python -m tests.figures $(ARGS)

# -W -n: a warning is an error, and so is a name that leads nowhere
docs links: export OMP_NUM_THREADS = 1
docs links: export HF_HUB_OFFLINE = 1
docs links: SPHINX = $(BIN)/python -m sphinx -W -n --keep-going -q -d build/docs/doctrees
docs: $(VENV)/.docs-$(KEY)
	$(SPHINX) -b html docs build/docs/html
	$(BIN)/python docs/check_links.py build/docs/html

# the links to other sites, which need a network
links: $(VENV)/.docs-$(KEY)
	$(SPHINX) -b linkcheck docs build/docs/links

# two processes of many threads each slow one another down tenfold: one thread each
tests sweeps coverage devices architectures fuzz: export OMP_NUM_THREADS = 1
tests sweeps coverage devices architectures fuzz: export HF_HUB_OFFLINE = 1
tests sweeps: PYTEST = $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal
tests: $(VENV)/.test-$(KEY)
	$(PYTEST) -m "not sweep" $(ARGS)

sweeps: $(VENV)/.test-$(KEY)
	$(PYTEST) -m sweep $(ARGS)

coverage: $(VENV)/.test-$(KEY)
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal --cov --cov-report=term $(ARGS)

fuzz: $(VENV)/.test-$(KEY)
	$(BIN)/python tests/fuzz/run.py $(ARGS)

# the table that tests/test_devices.py compares with what it finds
devices: $(VENV)/.test-$(KEY)
	$(BIN)/python tests/devices_table.py

# the table that tests/test_anatomy.py and tests/test_architectures.py compare with what they find
architectures: $(VENV)/.test-$(KEY)
	$(BIN)/python -m tests.architectures docs/architectures.md --workers $(WORKERS)

# records anew and goes on to kill; tests/mutation/__init__.py says what each step does
mutants: $(VENV)/.test-$(KEY)
	rm -rf build/mutants
	$(BIN)/python -m tests.mutation record --pytest "-n $(WORKERS) --dist worksteal"
	$(BIN)/python -m tests.mutation kill
	$(BIN)/python -m tests.mutation report

format: $(VENV)/.test-$(KEY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build dist runs notebooks/runs notebooks/tied_lora.py .coverage .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit("adapterzoo needs Python 3.11 or newer, this is " + sys.version.split()[0] + ". Write: make PYTHON=python3.11" if sys.version_info < (3, 11) else 0)'
	@$(PYTHON) -m venv $(VENV)

# the quickstart imports a small part of what is installed: bytecode is made of that alone
$(VENV)/.quickstart-$(KEY): INSTALL += --no-compile
$(VENV)/.%-$(KEY): | $(BIN)/python
	@grep -vE '$(UNPINNED)' constraints.txt > $(CONSTRAINTS)
	@echo 'installing $(TORCH)'
	@$(INSTALL) -c $(CONSTRAINTS) '$(TORCH)' editables hatchling
	@echo 'installing adapterzoo and what it needs for: $*'
	@$(INSTALL) -c $(CONSTRAINTS) --no-build-isolation -e '.[$*]'
	@echo 'installing a model and reviews'
	@$(INSTALL) --no-deps --require-hashes -r $(DATA)
	@find $(VENV) -maxdepth 1 -name '.*-*' ! -name '*-$(KEY)' -delete
	@touch $@
