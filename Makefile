# Needs Python 3.11 or newer, Java 17 or newer and make. `make setup` fetches everything else.

PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
HALFWAY := $(VENV)/bin/halfway
CODE := pipelines transforms schemas clients conf
N ?= 100
SEED ?= 1
RUNS ?= 3
COMMA := ,
PIP_AUDIT := 2.10.1
BROKERS ?= $(if $(filter file,$(origin N)),1$(COMMA)3,1)
# An environment that was moved or copied is made anew: its scripts have the old folder's name.
# The stamp's name depends on the lock, the metadata and the folder, so that file times do not matter.
STAMP := $(VENV)/.stamp-$(shell (cat requirements.lock setup.cfg pyproject.toml; pwd) 2>/dev/null | cksum | tr ' ' '-')

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help setup tools jars run test test-slow test-long deploy-check test-unit chaos bench curves pictures notebooks simulate planted \
  kills soak fuzz lint format types lock constraints audit clean

help: ## show this help
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: tools $(STAMP) ## create the environment in .venv (quick if it exists)

tools:
	@command -v $(PYTHON) >/dev/null 2>&1 || \
	  { echo "error: $(PYTHON) does not exist: install Python 3.11 or newer, or run make PYTHON=/path/to/python3" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "error: $(PYTHON) is older than Python 3.11: run make PYTHON=/path/to/python3 with a newer one" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
	  { echo "error: $(PYTHON) has no venv module: install it (Debian, Ubuntu: apt install python3-venv)" >&2; exit 1; }
	@test -d src/halfway/schemas/ || \
	  { echo "error: this checkout has no symbolic links: git config core.symlinks true && git checkout -- src" >&2; exit 1; }
	@PYTHONPATH=src $(PYTHON) -m halfway.pipelines.runtime.java

$(STAMP):
	@echo "setting up $(VENV): fetching PySpark and its dependencies, about 600 MB, once ..." >&2
	@$(PY) -c '' 2>/dev/null && grep -qsF '$(CURDIR)/$(VENV)' $(VENV)/bin/activate || $(PYTHON) -m venv --clear $(VENV)
	@rm -f $(VENV)/.stamp-*
	@[ -t 1 ] || quiet=--quiet; set -x; $(PY) -m pip install $$quiet --require-hashes -r requirements.lock
	PYTHONWARNINGS=ignore $(PY) -m pip install --quiet --no-deps --no-build-isolation --editable .
	@touch $@

jars: setup ## fetch the JARs of Spark, Kafka and the tests' databases, and archive the classes that a start loads (once)
	@$(PY) -m halfway.pipelines.runtime.jars spark kafka databases
	@$(PY) -m halfway.pipelines.local.class_archive

run: setup ## run a local Kafka, the topics, the job and the demo; fails unless the demo's outcome is right
	@trap 'code=$$?; case "$$started" in *"is running"*) $(HALFWAY) broker stop || exit 1 ;; esac; exit $$code' EXIT; \
	trap 'kill $$demo 2>/dev/null; wait; exit 130' INT; trap 'kill $$demo 2>/dev/null; wait; exit 143' TERM; \
	started=$$($(HALFWAY) broker start) || exit 1; echo "$$started"; \
	$(HALFWAY) demo & demo=$$!; wait $$demo

# Three workers, because most tests mostly wait for Kafka or for a batch. Each has a broker and a Spark, 3.5 GB together.
test: setup jars ## run all tests but the slow and the long ones, with a real Kafka and a real Spark
	@$(PY) -m pytest -m "not slow and not long" --numprocesses 3 --dist worksteal --durations 20

test-slow: setup jars ## run the slow tests: a cluster, long examples, commands beside a running job
	@$(PY) -m pytest -m "slow and not long" --numprocesses 2 --dist load --maxschedchunk 1 --durations 20

test-long: setup jars ## run the tests on the real parts whose rules unit tests or the simulator hold too; an hour
	@$(PY) -m pytest -m long --numprocesses 2 --dist load --maxschedchunk 1 --durations 20

deploy-check: setup ## hold bundle, manifests, image, alerts and commands of docs/ against the models of where they go
	@$(PY) -m pytest tests/deploy

test-unit: setup ## run the tests that need neither Spark nor Kafka
	@$(PY) -m pytest tests/unit

chaos: jars ## make N faults and count what is lost, twice or wrong (SEED, BROKERS=3); without N: 100, then a million records
	@$(PY) -m tests.chaos --faults $(N) --seed $(SEED) --brokers $(BROKERS)
	$(if $(filter file,$(origin N)),@$(PY) -m tests.fuzz --records 1000000 --seed $(SEED))

bench: jars ## run the benchmarks into build/bench.json (ONLY=drain,pending RUNS=3 PEER=run.sh)
	@$(PY) -m benchmarks.bench --only "$(ONLY)" --runs $(RUNS) $(if $(PEER),--peer $(PEER))

curves: jars ## measure what grows, and draw it into build/curves (ONLY=pending,rows)
	@$(PY) -m benchmarks.curves --only "$(ONLY)"

pictures: jars ## run everything once, and draw what terminals show, and the figures beside RocketMQ's, into docs/pictures
	@$(PY) -m benchmarks.terminal

notebooks: setup ## run both notebooks on your tables; pictures and HTML go to build/notebooks
	@$(PY) -m notebooks.explore_pending
	@$(PY) -m notebooks.audit_resolutions

simulate: N := 10000
simulate: $(if $(REAL),jars,setup) ## play N histories (10000) in simulated time (SEED, JOBS); REAL=30: play 30 on a real Kafka and Spark too
	@$(PY) -m tests.simulation --histories $(N) --seed $(SEED) $(if $(JOBS),--jobs $(JOBS)) $(if $(REAL),--real $(REAL))

planted: setup ## plant defects into the product one at a time, and print which simulated history finds each; fails if one is missed
	@$(PY) -m tests.simulation.planted

kills: N := 1000
kills: jars ## kill N consumers (1000), then N services on each database, and compare orders with messages (DATABASES, SEED)
	@$(PY) -m tests.kills --kills $(N) --seed $(SEED) $(if $(DATABASES),--databases $(DATABASES))

soak: jars ## run an hour of traffic with a fault every five minutes; fails if anything is lost or grows
	@$(PY) -m tests.chaos.soak

fuzz: N := 1000000
fuzz: SEED := 7
fuzz: jars ## send N records of every shape (a million) through the job, then N signed and forged ones, and account for each (SEED)
	@$(PY) -m tests.fuzz --records $(N) --seed $(SEED)
	@$(PY) -m tests.fuzz --records $(N) --seed $(SEED) --signed --out build/fuzz-signed.json

lint: setup ## ruff rules and format; the lock has a hash for every package, and the packages fit together
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check .
	@$(PY) -m pytest -q tests/unit/test_lock.py
	@$(PY) -m pip check

format: setup ## correct format and imports with ruff
	@$(PY) -m ruff check --fix-only --quiet .
	@$(PY) -m ruff format .

types: setup ## run mypy --strict
	@$(PY) -m mypy --strict -p halfway

lock: setup ## regenerate requirements.lock from setup.cfg
	@CUSTOM_COMPILE_COMMAND="make lock" $(PY) -m piptools compile --quiet --upgrade --generate-hashes --all-extras --allow-unsafe \
	  --strip-extras --no-emit-index-url --no-emit-find-links --no-emit-trusted-host --no-emit-options \
	  --output-file requirements.lock setup.cfg

constraints: setup ## write dist/constraints.txt: what a cluster needs, in the lock's versions, with hashes
	@mkdir -p dist
	@CUSTOM_COMPILE_COMMAND="make constraints" $(PY) -m piptools compile --quiet --generate-hashes --extra job --extra metrics \
	  --extra tables --constraint requirements.lock --allow-unsafe --strip-extras --no-emit-index-url --no-emit-find-links \
	  --no-emit-trusted-host --no-emit-options --output-file dist/constraints.txt setup.cfg

audit: tools ## look the locked packages up in a database of known vulnerabilities; needs a connection to pypi.org
	@$(PYTHON) -m venv build/audit
	@build/audit/bin/python -m pip install --quiet pip-audit==$(PIP_AUDIT)
	@build/audit/bin/pip-audit --strict --require-hashes --disable-pip --requirement requirements.lock

clean: ## stop the local Kafka; remove .venv, .halfway (with its data) and caches
	@if [ -x $(HALFWAY) ] && ! $(HALFWAY) broker stop; then exit 1; fi
	@rm -rf $(VENV) .halfway build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis spark-warehouse metastore_db derby.log
	@find $(CODE) tests benchmarks examples notebooks -name __pycache__ -type d -prune -exec rm -rf {} +
