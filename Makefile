# Two commands on a machine with nothing but Python 3.11+ and make: `make sweep` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# The stamp is newer than the two files that decide what is installed, or the environment is brought up to date.
STAMP := $(VENV)/.installed

# Python writes byte code down even where the shell says not to: every process would compile the tests anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: api sweep test test-all test-packages test-axolotl test-versions test-product fuzz lint format bench size docs docs-version docs-serve screenshots build release clean

sweep: $(STAMP)
	$(BIN)/python -m remat sweep $(ARGS)

# `make test ROOM=scan` runs the tests of one room; a path in tests/ is one, too.
test: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -m 'not slow' $(ROOM:%=tests/$(patsubst tests/%,%,$(ROOM))) $(ARGS)

# Everything; `make test-all ARGS='-m slow'` is what `make test` leaves out. Triton compiles for GPUs that are
# not there; it is large, and nothing else needs it.
test-all: $(STAMP)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[gpu]'
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 $(ARGS)

# Regions inside real trainers; their packages without what these tests do not use, and Triton, which one imports.
test-packages: $(STAMP)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[gpu]'
	$(BIN)/python -m pip install --quiet --no-deps -c constraints.txt torchtitan==0.3.0 spmd_types==0.2.3 torchdata \
		torch_checkpointing accelerate==1.15.0 lightning==2.6.6 pytorch-lightning lightning-utilities torchmetrics \
		opacus==1.6.0 opt_einsum psutil deepspeed==0.19.8 hjson msgpack ninja py-cpuinfo
	$(BIN)/python -m pip install --quiet -c constraints.txt trl==1.16.0 datasets
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(ARGS) $(addprefix tests/interop/test_,packages.py run.py opacus.py deepspeed.py)

# Axolotl's command pins its packages. Of these what a step on a CPU takes, in an environment of their own.
test-axolotl:
	test -x .venv-axolotl/bin/python || $(PYTHON) -m venv .venv-axolotl
	.venv-axolotl/bin/python -m pip install --quiet torch==2.13.0
	.venv-axolotl/bin/python -m pip install --quiet -e . pytest tyro nvidia-ml-py requests transformers==5.16.1 trl==1.9.0 accelerate==1.13.0 \
		peft==0.20.0 datasets==4.8.4 kernels==0.16.0 optimum==1.16.2 mistral-common==1.11.5 addict art colorama einops evaluate \
		fastcore fire numba posthog python-dotenv schedulefree scipy sentencepiece tensorboard triton wandb zstandard
	.venv-axolotl/bin/python -m pip install --quiet --no-deps axolotl==0.19.0 axolotl-contribs-lgpl==0.0.7 \
		axolotl-contribs-mit==0.0.6 bitsandbytes==0.50.2 torchao==0.17.0
	OMP_NUM_THREADS=1 .venv-axolotl/bin/python -m pytest $(ARGS) tests/interop/test_axolotl.py

# Programs drawn at random, with regions and without; `ARGS='--seeds 0:1000 --modes eager,func,aot_eager'`.
fuzz: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.fuzz $(ARGS)

# Programs of the bank in ways, under policies and on layouts that are drawn at random; the seed is printed.
SECONDS ?= 600
test-product: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.bank --seconds $(SECONDS) $(ARGS)

# The quick tests of the engine under torch 2.11 to 2.15; `ARGS='2.11.0 2.15.0'`. Downloads several GB for each.
test-versions:
	PYTHON=$(PYTHON) .ci/versions $(ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(STAMP)
	# JAX is one of the peers, and of use for nothing else here.
	$(BIN)/python -m pip install --quiet -c constraints.txt 'jax>=0.4.30'
	$(BIN)/python -m benchmarks run --suite quick --fresh $(ARGS)
	$(BIN)/python -m benchmarks report --suites quick

# Writes public names and signatures down anew; CHANGELOG.md must speak of each that changed.
api: $(STAMP)
	$(BIN)/python -m tests.repo.reference --write

docs: $(STAMP)
	$(BIN)/mkdocs build --strict

# Statements, lines and docstrings of each package; `ARGS='transforms/scan'` counts a folder.
size:
	$(PYTHON) -m benchmarks.size $(ARGS)

# The pictures of the site and of the report's page; needs chromium.
screenshots: $(STAMP)
	$(BIN)/python -m docs.screenshots

# Puts this version beside the others on the branch gh-pages; `ARGS=--push` publishes it.
docs-version: $(STAMP)
	version=$$($(BIN)/python -c 'import remat; print(remat.__version__)') && export PATH="$(CURDIR)/$(BIN):$$PATH" \
		&& mike deploy --update-aliases $(ARGS) "$$version" latest && mike set-default $(ARGS) latest

docs-serve: $(STAMP)
	$(BIN)/mkdocs serve

build: $(STAMP)
	$(BIN)/python -m hatchling build

# What a release would upload, built, checked and used; nothing is uploaded. A pushed tag publishes (.github/workflows).
release: $(STAMP)
	.ci/release $(BIN)/python

clean:
	rm -rf build dist site out .pytest_cache .ruff_cache

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "remat needs Python 3.11 or newer; try: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	# torch by itself first: the pinned build is in place before anything that depends on torch is resolved.
	$(BIN)/python -m pip install --quiet -c constraints.txt torch
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	touch $(STAMP)
