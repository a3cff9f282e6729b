# `make demo` and `make test` need python3 (3.11 or newer) with pip, and nothing else: everything goes into .venv.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
WORKERS ?= $(shell getconf _NPROCESSORS_ONLN)
PYTEST := $(BIN)/pytest -n $(WORKERS) --dist worksteal
INSTALLED := $(VENV)/.installed
EXTRAS_INSTALLED := $(VENV)/.extras-installed
ROUNDS ?= 20
LOOPS ?= 4
VLLM := .venv-vllm
CLIENTS := .venv-clients
VLLM_INSTALLED := $(VLLM)/.installed
CUDA := .venv-cuda
CUDA_INSTALLED := $(CUDA)/.cuda-installed

DOCS_INSTALLED := $(VENV)/.docs-installed
# What the quick tests need, and which they are.
QUICK_EXTRAS := train,lora,plot,api,serve,viewer,gateway,dev
QUICK := -m "not slow and not extras and not vllm and not fake_cuda and not clients" --ignore tests/house
# The ends of pyproject's ranges, each with a file constraints-NAME.txt.
ENDS := lowest newest

# Where it is set, each of the tests' hundreds of processes compiles every module that it imports.
unexport PYTHONDONTWRITEBYTECODE
# pip would compile all modules of all packages, one after the other; most of them are never imported.
export PIP_COMPILE := 0

.PHONY: help install extras demo docs docs-links reference viewer lint types house sources test test-all quick-tests all-tests campaigns campaigns-vllm stress \
  test-cuda-fake test-versions $(ENDS:%=test-%) gpu-kit vllm test-vllm test-clients clean

help:
	@echo "make install   Verbatim and its tools in $(VENV) (once; again when the pins change)"
	@echo "make demo      train an agent to play guess-the-number, on a CPU"
	@echo "make docs      the documentation site in build/docs (warnings are errors); docs-links asks for every link outside"
	@echo "make reference the generated pages and figures of docs/, anew"
	@echo "make viewer    the page of verbatim view, built from viewer/ into src/verbatim/inspection/viewer/assets (needs Node 20 or newer; nothing else does)"
	@echo "make test      lint, types, and the tests that take seconds and need no extras"
	@echo "make test-all  the extras (MCP, datasets, Ray, verifiers, reasoning-gym, textarena, W&B) installed, and all tests but those of vLLM"
	@echo "make campaigns every campaign as a whole (kills, damaged files, hostile templates, random trees, planted faults, ...): hours"
	@echo "make stress    the tests that start processes, open sockets or wait, ROUNDS=20 times beside LOOPS=4 busy loops"
	@echo "make test-cuda-fake  a build of torch for CUDA in $(CUDA) (5 GB), and the trainer and the sampler on fake CUDA tensors; no GPU needed"
	@echo "make test-versions   the quick tests with the lowest, the pinned and the newest torch and transformers (twice 5 GB: PyPI's torch is for CUDA)"
	@echo "make gpu-kit   a folder that checks and measures on a machine with a GPU and without a network (PYTHON_VERSION=3.12; TRL=no)"
	@echo "make test-clients  agents on other people's SDKs and codex, in $(CLIENTS), against the gateway (NODE=no: without codex)"
	@echo "make test-vllm an environment with vLLM in $(VLLM), and the tests with real vLLM servers"
	@echo "make clean     remove all environments ($(VENV), ...) and caches; runs/ stays"

install: $(INSTALLED)

$(INSTALLED): pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null || { \
	  echo "there is no $(PYTHON); install Python 3.11 or newer, or type: make $(MAKECMDGOALS) PYTHON=python3.12" >&2; \
	  exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "$(PYTHON) is $$($(PYTHON) --version 2>&1), expected 3.11 or newer;" \
	    "type: make $(MAKECMDGOALS) PYTHON=python3.12" >&2; exit 1; }
	@# Where the system's Python comes without ensurepip, its pip installs one into the environment.
	@test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV) >/dev/null 2>&1 || { \
	  $(PYTHON) -m venv --clear --without-pip $(VENV) && \
	  $(PYTHON) -m pip --python $(BIN)/python install --quiet pip; }
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[$(QUICK_EXTRAS)]'
	@touch $@

demo: install
	$(BIN)/verbatim rl recipes/guess_number.toml

$(DOCS_INSTALLED): pyproject.toml constraints.txt | install
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[docs]'
	@touch $@

SPHINX := $(BIN)/python -m sphinx --fail-on-warning --keep-going --quiet -c docs/docs_site docs

docs: install $(DOCS_INSTALLED)
	$(SPHINX) -b html build/docs
	@echo "build/docs/index.html"

docs-links: install $(DOCS_INSTALLED)
	$(SPHINX) -b linkcheck build/docs-links

reference: install
	PYTHONPATH=docs $(BIN)/python -m docs_site

viewer:
	cd viewer && npm ci --no-audit --no-fund && npm run build

$(EXTRAS_INSTALLED): pyproject.toml constraints.txt | install
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[train,gguf,lora,plot,api,serve,viewer,gateway,mcp,data,ray,verifiers,environments,s3,wandb,tensorboard,mlflow,docs,dev,dev-s3]'
	@touch $@ $(DOCS_INSTALLED)

extras: $(EXTRAS_INSTALLED)

# What is wrong with a source or a page shows first, in one process.
house: install
	$(BIN)/pytest -p no:xdist tests/house

test: sources quick-tests

test-all: extras sources all-tests

# Each on a core of its own.
sources: install
	@$(MAKE) --no-print-directory -j2 lint types house

quick-tests: install
	$(PYTEST) $(QUICK)

# The quick tests with the lowest, the pinned and the newest versions of the ranges; and those of several processes, which the
# oldest torch runs by code of our own.
test-versions: quick-tests $(ENDS:%=test-%)

$(ENDS:%=test-%): test-%: .venv-%/.installed
	.venv-$*/bin/python -c 'import torch, transformers; print("$*: torch", torch.__version__, "transformers", transformers.__version__)'
	.venv-$*/bin/python -m pytest -n $(WORKERS) --dist worksteal $(QUICK)
	.venv-$*/bin/python -m pytest -n $(WORKERS) --dist worksteal tests/trainer/test_parallel.py

# constraints.txt, but for the packages that constraints-NAME.txt has.
$(ENDS:%=.venv-%/.installed): .venv-%/.installed: pyproject.toml constraints.txt constraints-%.txt | install
	rm -rf .venv-$*
	$(PYTHON) -m venv --without-pip .venv-$*
	awk -F== 'NR == FNR {own[$$1]; print; next} !($$1 in own)' constraints-$*.txt constraints.txt > .venv-$*/constraints.txt
	$(BIN)/python -m pip --python .venv-$*/bin/python install --quiet -c .venv-$*/constraints.txt pip -e '.[$(QUICK_EXTRAS)]'
	@touch $@

# One worker more than cores, because many of these tests wait for processes that they start.
all-tests: extras
	$(PYTEST) -n $$(($(WORKERS) + 1)) -m "not vllm and not fake_cuda and not clients" --ignore tests/house

campaigns: extras
	$(PYTEST) --whole -m "campaign and not vllm and not fake_cuda and not clients"

stress: extras
	$(BIN)/python tests/stress.py --rounds $(ROUNDS) --loops $(LOOPS) -- -m "realtime and not vllm and not fake_cuda and not clients"

test-cuda-fake: install $(CUDA_INSTALLED)
	$(CUDA)/bin/python -m pytest -n $(WORKERS) --dist worksteal -m fake_cuda tests/cuda

# Where the torch of $(VENV) is for CUDA, that one; else one of its own, and of $(VENV) all other packages.
TORCH := $(shell sed -n 's/^torch==//p' constraints.txt)

$(CUDA_INSTALLED): constraints.txt | install
	rm -rf $(CUDA)
	if $(BIN)/python -c 'import sys, torch; sys.exit(torch.version.cuda is None)'; then \
	  ln -s $(VENV) $(CUDA); \
	else \
	  $(PYTHON) -m venv --without-pip $(CUDA) && \
	  $(BIN)/python -m pip --python $(CUDA)/bin/python install --quiet 'torch==$(TORCH),!=$(TORCH)+cpu' && \
	  site='import sysconfig; print(sysconfig.get_path("purelib"))' && \
	  echo "import site; site.addsitedir('$$($(BIN)/python -c "$$site")')" \
	    > "$$($(CUDA)/bin/python -c "$$site")/zz_other_packages.pth"; \
	fi
	$(CUDA)/bin/python -c 'import torch; assert torch.version.cuda, torch.__version__'
	@touch $@

PYTHON_VERSION ?= 3.12

gpu-kit: install
	$(BIN)/python benchmarks/gpu_kit/build.py --python-version $(PYTHON_VERSION) $(if $(filter no,$(TRL)),--without-trl)

# Two at a time, each with the tests of some servers (their xdist_group): to start one keeps one core busy, and each takes
# a gibibyte of memory. The other files have nothing for it, and take long to collect.
test-vllm: install $(VLLM_INSTALLED)
	VLLM_CPU_KVCACHE_SPACE=1 VERBATIM_VLLM_PYTHON=$(abspath $(VLLM))/bin/python $(BIN)/pytest -n 2 --dist loadgroup \
	  -m "vllm and not on_demand" $$(grep -rl --include='test_*.py' 'mark\.vllm' tests)

vllm: $(VLLM_INSTALLED)

$(VLLM_INSTALLED): src/verbatim/inference/vllm/install.py | install
	$(BIN)/verbatim inference --install $(VLLM)
	@touch $@

# Agents on other people's SDKs. Their packages pin each other's versions, so litellm has an environment of its own.
WITHOUT_NODE := $(filter no,$(NODE))

test-clients: $(if $(WITHOUT_NODE),,$(CLIENTS)/.codex) install $(CLIENTS)/.agents $(CLIENTS)/.litellm
	VERBATIM_CLIENTS=$(abspath $(CLIENTS)) $(BIN)/pytest -m clients \
	  $(if $(WITHOUT_NODE),--deselect tests/rollouts/gateway/test_clients.py::test_codex)
	@$(if $(WITHOUT_NODE),echo "codex was NOT tested: NODE=no",:)

$(CLIENTS)/.agents $(CLIENTS)/.litellm: $(CLIENTS)/.%: tests/rollouts/gateway/clients/%.txt | install
	$(PYTHON) -m venv --without-pip $(CLIENTS)/$*
	$(BIN)/python -m pip --python $(CLIENTS)/$*/bin/python install --quiet -r $<
	@touch $@

$(CLIENTS)/.codex: tests/rollouts/gateway/clients/package.json
	@command -v npm >/dev/null || { \
	  echo "there is no npm, so codex cannot be tested; install Node 20 or newer, or leave it out: make test-clients NODE=no" >&2; \
	  exit 1; }
	@mkdir -p $(CLIENTS)/node && cp $< $(CLIENTS)/node
	npm install --prefix $(CLIENTS)/node --no-audit --no-fund --silent
	@touch $@

campaigns-vllm: install $(VLLM_INSTALLED)
	VLLM_CPU_KVCACHE_SPACE=1 VERBATIM_VLLM_PYTHON=$(abspath $(VLLM))/bin/python $(BIN)/pytest --whole -m "(campaign or on_demand) and vllm" -s

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check --quiet .

types: install
	$(BIN)/mypy

clean:
	rm -rf $(VENV) $(VLLM) $(CUDA) $(CLIENTS) $(ENDS:%=.venv-%) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis src/*.egg-info
	find src tests recipes benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
