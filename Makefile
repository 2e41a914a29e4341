# make quickstart   trains two adapters on a real model and real data, in three minutes
# make compare      accuracy, parameters, time and memory of all methods on these reviews
# make test         lint, types, import layers and the quick tests; run before each commit
# make sweep        the other tests: every architecture, dtype, kernel configuration, notebook and page;
#                   ARGS=--part for the fixed twentieth of them that CI runs
# make docs         builds the site offline into build/docs/html; make links checks its links
# make readme       builds the wheel, and runs the command line and the code of the README with only
#                   the declared dependencies
# make newest       the README and the tests of methods and model with the newest versions of all
#                   but torch; make oldest: with the oldest that are supported; ARGS=--part: fewer tests
# make notebooks    runs the notebooks from top to bottom and saves their outputs
# make fuzz         random sequences of calls on tiny models: make fuzz ARGS="--minutes 10"
# make plain        every method at modules that are not of transformers, in 15 minutes; writes
#                   docs/plain-modules.md
# make serving      every method for every server; writes docs/serving.md
# make training     every trainer, method and base with every engine; writes docs/training-matrix.md
# make mutants      counts how many of 60 planted bugs the tests catch; takes an hour or two
# make bench        measures the cost of adapters on this CPU, compared with PEFT
# make growth       how these costs grow with adapters, ranks and tokens, as curves
# make many         many adapters trained in one run beside as many runs: results, time, memory
# make batching     requests with many adapters in one batch beside adapter by adapter: tokens, time
# make bench-gpu    the same on a GPU, in 8 minutes: make TORCH=torch bench-gpu; ARGS=--first for
#                   the first fifteen minutes on a GPU, then ARGS="--first --continue"
#
# Each command creates the virtual environment if it is missing and needs only Python and make.
# To use a torch other than the one CI tests:   make TORCH=torch quickstart

PYTHON ?= python3
VENV ?= .venv
WORKERS ?= 2
ARGS ?=

BIN := $(VENV)/bin
# no warnings about conflicts: the packages in DATA are installed without their dependencies
PIP := -m pip --disable-pip-version-check --no-input -qq
INSTALL := $(BIN)/python $(PIP) install --no-warn-conflicts
PINNED_TORCH := $(shell grep '^torch==' constraints.txt)
TORCH ?= $(PINNED_TORCH)

# another torch needs its own triton, so neither is pinned
UNPINNED := $(if $(filter $(PINNED_TORCH),$(TORCH)),^$$,^(torch|triton)==)
CONSTRAINTS := $(VENV)/constraints.txt
DATA := examples/data-requirements.txt

# content, not times: a fresh clone has new times; the version is part of the installed metadata
KEY := $(shell (cat pyproject.toml constraints.txt $(DATA); echo '$(TORCH)'; \
	grep '^__version__' adapterzoo/__init__.py) | cksum | cut -d ' ' -f 1)

.PHONY: help quickstart compare readme notebooks bench growth many batching bench-gpu test sweep lint types floors figures \
	newest oldest docs links tests sweeps coverage devices calls plain serving training merging architectures frames exact peft-files quantized fixed fuzz mutants format clean
# tests start many processes; without bytecode each of them compiles all that it imports
unexport PYTHONDONTWRITEBYTECODE
.NOTPARALLEL:
.DELETE_ON_ERROR:

help:
	@sed -n '/^$$/q; s/^# \{0,1\}//p' Makefile

# threads wait without spinning: on shared cores, spinning takes most of the time
quickstart compare: export OMP_WAIT_POLICY = PASSIVE
compare: export OMP_NUM_THREADS = 1
quickstart: $(VENV)/.quickstart-$(KEY)
	@$(BIN)/python examples/quickstart.py $(ARGS)

compare: $(VENV)/.quickstart-$(KEY)
	@$(BIN)/python benchmarks/compare.py $(ARGS)

# a wheel, built from the source distribution, with only its declared dependencies
readme: $(VENV)/.test-$(KEY)
	rm -rf build/readme
	$(BIN)/python -m hatchling build -t sdist -d build/readme
	$(BIN)/python $(PIP) wheel --no-deps --no-build-isolation -w build/readme build/readme/*.tar.gz
	$(BIN)/python -m venv build/readme/venv
	build/readme/venv/bin/python $(PIP) install --no-compile -c $(CONSTRAINTS) '$(TORCH)' build/readme/*.whl
	$(BIN)/python tests/run_readme.py build/readme/venv/bin/python build/readme/*.whl

newest oldest: export OMP_NUM_THREADS = 1
newest oldest: export HF_HUB_OFFLINE = 1
newest oldest: $(VENV)/.test-$(KEY)
	$(BIN)/python tests/run_versions.py $@ --workers $(WORKERS) $(ARGS)

notebooks: export OMP_NUM_THREADS = 1
notebooks: $(VENV)/.docs-$(KEY)
	$(BIN)/python notebooks/execute.py $(ARGS)

bench: export OMP_NUM_THREADS = 1
bench: export HF_HUB_OFFLINE = 1
bench: $(VENV)/.bench-$(KEY)
	$(BIN)/python benchmarks/cpu.py $(ARGS)

growth: export OMP_NUM_THREADS = 1
growth: export HF_HUB_OFFLINE = 1
growth: $(VENV)/.bench-$(KEY)
	$(BIN)/python benchmarks/growth.py $(ARGS)

many: export OMP_NUM_THREADS = 1
many: export HF_HUB_OFFLINE = 1
many: $(VENV)/.bench-$(KEY)
	$(BIN)/python benchmarks/many.py $(ARGS)

batching: export OMP_NUM_THREADS = 1
batching: export HF_HUB_OFFLINE = 1
batching: $(VENV)/.bench-$(KEY)
	$(BIN)/python benchmarks/batching.py $(ARGS)

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

# -W -n: warnings are errors, and so are unresolved names
docs links: export OMP_NUM_THREADS = 1
docs links: export HF_HUB_OFFLINE = 1
docs links: SPHINX = $(BIN)/python -m sphinx -W -n --keep-going -q -d build/docs/doctrees
docs: $(VENV)/.docs-$(KEY)
	$(SPHINX) -b html docs build/docs/html
	$(BIN)/python docs/check_links.py build/docs/html

# checks links to other sites; needs a network
links: $(VENV)/.docs-$(KEY)
	$(SPHINX) -b linkcheck docs build/docs/links

# two processes with many threads each slow each other down tenfold, so one thread each
tests sweeps coverage devices calls plain serving training merging architectures frames exact peft-files quantized fixed fuzz: export OMP_NUM_THREADS = 1
tests sweeps coverage devices calls plain serving training merging architectures frames exact peft-files quantized fixed fuzz: export HF_HUB_OFFLINE = 1
tests sweeps: PYTEST = $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal
tests: $(VENV)/.test-$(KEY)
	$(PYTEST) -m "not sweep" $(ARGS)

sweeps: $(VENV)/.test-$(KEY)
	$(PYTEST) -m sweep $(ARGS)

coverage: $(VENV)/.test-$(KEY)
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal --cov --cov-report=term $(ARGS)

fuzz: $(VENV)/.test-$(KEY)
	$(BIN)/python tests/fuzz/run.py $(ARGS)

# writes the table that tests/test_devices.py checks
devices: $(VENV)/.test-$(KEY)
	$(BIN)/python tests/devices_table.py

# writes the table that tests/test_calls.py checks; ARGS="llama t5" runs these models only
calls: $(VENV)/.test-$(KEY)
	$(BIN)/python tests/calls_table.py $(ARGS)

# writes the tables that tests/test_plain_table.py checks; cells of diffusers' modules stay as they are
# where it is not installed; ARGS="MLP 'UNet, attention'" runs these modules only, ARGS=--new the
# cells that the page lacks
plain: $(VENV)/.test-$(KEY)
	$(BIN)/python tests/plain_table.py $(ARGS)

# writes the tables that tests/serving/test_serving_table.py checks, in two minutes
serving: $(VENV)/.test-$(KEY)
	$(BIN)/python tests/serving_table.py

# writes the table that tests/test_training_table.py checks; engines of packages that are not
# installed stay as they are; ARGS="FSDP2 AdapterTrainer lora" runs these only, and one process;
# two hours of one core
training: $(VENV)/.test-$(KEY)
	$(BIN)/python tests/training_table.py $(ARGS)

# writes the page that tests/test_merged_sites.py checks, for the model types that it does not have;
# ARGS="--types bert" runs these, ARGS=--again all, which takes half an hour of one core
merging: $(VENV)/.test-$(KEY)
	$(BIN)/python tests/merged_table.py $(ARGS)

# writes the table that tests/test_anatomy.py and tests/test_architectures.py check;
# ARGS="--types bert" runs that row only, ARGS=--stale those that a new method at linear layers takes
architectures: $(VENV)/.test-$(KEY)
	$(BIN)/python -m tests.architectures docs/architecture-table.md --workers $(WORKERS) $(ARGS)

# writes the table of docs/switching.md that tests/test_frames.py checks; two minutes
frames: $(VENV)/.test-$(KEY)
	$(BIN)/python tests/frames_table.py

# writes the table that tests/kernels/test_exact.py checks: saved bytes, operators, launches, frames, files
exact: $(VENV)/.test-$(KEY)
	PYTHONPATH=benchmarks:tests $(BIN)/python tests/kernels/exact_table.py

# writes the page that tests/test_peft_table.py checks
peft-files: $(VENV)/.test-$(KEY)
	$(BIN)/python tests/peft_table.py

# writes the table of docs/quantized.md that tests/test_quantized_table.py checks; rows of packages that
# are not installed stay as they are; ARGS="'hqq 4 bits' gptq" runs these only
quantized: $(VENV)/.test-$(KEY)
	$(BIN)/python tests/quantized_table.py $(ARGS)

# prints what differs from the tables that tests/test_fixed.py checks: files, values, names;
# ARGS=--write rewrites them, ARGS="names --write" one of them
fixed: $(VENV)/.test-$(KEY)
	PYTHONPATH=tests $(BIN)/python -m fixed $(ARGS)

# records again, then kills; tests/mutation/__init__.py describes each step
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

# the quickstart imports only a small part of what is installed; only that part is compiled to bytecode
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
