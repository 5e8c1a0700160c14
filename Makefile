# make demo   install psctl into .venv and train on the embedded local cluster
# make test   install what the tests need (as root also system packages) and run them: some 16 minutes on two cores;
#             five files at a time, for they also wait for real processes; the long files first (tests/conftest.py);
#             a test that runs into its time limit ends its process, and with it the run, which would hang otherwise
# make unit   the pure tests: no root, no network, no processes; under 60 s on two cores
# make simulate SEEDS=10000   the parameter server and the coordinator, with thousands of seeds of simulated faults
# make torture HOURS=1   random faults on test hosts, and the promises of docs/failures.md after each (root)
# make soak   the long ones, three at a time; make bench: measurements; make lint: ruff and mypy
# make audit  are the pinned versions complete, as installed, and without known vulnerabilities (says what it could not ask)
# make docs   the documentation as a site, in build/site; it installs what that needs
# make lock   pin what is installed in .venv, with hashes of what hosts are given (asks the index)

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
DOCS := >=9.5,<10
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet

UNIT := tests/spec tests/topology tests/schedule tests/ps tests/transport/protocol tests/job tests/coordinator tests/plan tests/view \
	tests/checkpoint tests/test_units.py tests/worker/test_loader.py tests/train_state/test_state_trees.py \
	tests/train_state/test_common_step.py tests/remote/test_known_hosts.py
PURE := $(UNIT) tests/launch
# Files with threads in the tests' own process, which `make soak` delays at random.
THREADED := tests/client tests/collectives tests/kv/test_store.py tests/server tests/sync tests/worker

.PHONY: demo docs unit test simulate torture soak bench lint audit lock clean system

demo: $(VENV)/installed
	$(BIN)/psctl train templates/digits/job.yaml

# Empty: the tests start hundreds of processes, which would all compile psctl anew where bytecode is not kept.
test soak simulate torture: export PYTHONDONTWRITEBYTECODE :=

test: system $(VENV)/installed-dev
	$(BIN)/python -m pytest tests -m "not soak" -n 5 --dist loadfile --no-loadscope-reorder --max-worker-restart 0 --durations=20

unit: $(VENV)/installed-dev
	$(BIN)/python -m pytest $(UNIT) -m "not soak" -n 2 --dist loadfile

SEEDS ?= 10000
FROM ?= 0

simulate: $(VENV)/installed-dev
	$(BIN)/python -m tests.simulation --seeds $(SEEDS) --from $(FROM)
	$(BIN)/python -m tests.simulation --what racks --seeds $(SEEDS) --from $(FROM)
	$(BIN)/python -m tests.simulation --what backward --seeds $(SEEDS) --from $(FROM)
	$(BIN)/python -m tests.simulation --what chain --seeds $(SEEDS) --from $(FROM)
	$(BIN)/python -m tests.simulation --what tables --seeds $(SEEDS) --from $(FROM)
	$(BIN)/python -m tests.simulation --what takeover --seeds $(SEEDS) --from $(FROM)
	$(BIN)/python -m tests.simulation --what leadership --seeds $(SEEDS) --from $(FROM)
	$(BIN)/python -m tests.simulation --mutants

HOURS ?= 1

torture: system $(VENV)/installed-dev
	$(BIN)/python -m tests.torture --hours $(HOURS) --from $(FROM)

soak: system $(VENV)/installed-dev $(VENV)/installed-fuzzer $(VENV)/installed-libraries
	$(BIN)/python -m pytest -m soak -n 3 --dist loadfile --no-loadscope-reorder --max-worker-restart 0 --timeout 1800 --durations=15
	$(BIN)/python -m pytest -p tests.helpers.thread_delays -m "not soak" -n 4 --timeout 600 $(THREADED)
	HYPOTHESIS_PROFILE=search $(BIN)/python -m pytest -m "not soak" -n 2 $(PURE)

bench: $(VENV)/installed-dev
	$(BIN)/python bench/transport.py
	$(BIN)/python bench/startup.py
	$(BIN)/python bench/status.py
	$(BIN)/python bench/links.py
	$(BIN)/python bench/slope.py
	$(BIN)/python bench/strategies.py
	$(BIN)/python bench/assignment.py
	$(BIN)/python bench/dataplane.py
	$(BIN)/python bench/allreduce.py
	$(BIN)/python bench/memory.py
	$(BIN)/python bench/strangers.py
	$(BIN)/python bench/failover.py
	$(BIN)/python bench/staleness.py
	$(BIN)/python bench/staleness.py --real

docs: $(VENV)/bin/python
	$(PIP) install -c psctl/constraints.txt "mkdocs-material$(DOCS)"
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build -q
	@echo "build/site/index.html"

lint: $(VENV)/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python .ci/sizes.py

audit: $(VENV)/installed-dev
	$(BIN)/python .ci/audit.py

lock: $(VENV)/installed-dev
	$(PYTHON) -m venv $(VENV)/lock
	$(VENV)/lock/bin/python -m pip --disable-pip-version-check --quiet install uv
	PATH="$(abspath $(VENV)/lock/bin):$$PATH" $(BIN)/python .ci/lock.py

# Only make soak needs the fuzzer, and some platforms have no build of it: its tests are skipped there.
$(VENV)/installed-fuzzer: | $(VENV)/installed-dev
	$(PIP) install atheris==3.0.0 || echo "atheris cannot be installed here: tests/fuzz runs its first inputs only"
	@touch $@

# What scripts of others import (tests/whole/scripts, templates), and a server of S3 with its client; tests skip where they are missing.
LIBRARIES := transformers==5.24.0 accelerate==1.15.0 lightning==2.6.6 s3fs==2026.9.0 "moto[s3,server]==5.2.5"

$(VENV)/installed-libraries: Makefile psctl/constraints.txt | $(VENV)/installed-dev
	$(PIP) install -c psctl/constraints.txt $(LIBRARIES)
	@touch $@

clean:
	rm -rf $(VENV) dist build

# Debian's python3 has no ensurepip before python3-venv is there; only root can mend that here.
$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "psctl needs Python 3.11 or newer: make PYTHON=python3.11 ..."; exit 1; }
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null || { test "$$(id -u)" = 0 && apt-get update -qq && apt-get install -y -qq python3-venv >/dev/null; } || { echo "install python3-venv first: apt install python3-venv"; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/installed: pyproject.toml psctl/constraints.txt | $(VENV)/bin/python
	$(PIP) install -c psctl/constraints.txt -e .
	@touch $@

$(VENV)/installed-dev: pyproject.toml psctl/constraints.txt | $(VENV)/bin/python
	$(PIP) install -c psctl/constraints.txt -e '.[dev]'
	@touch $@ $(VENV)/installed

SYSTEM = "sshd openssh-server" "ssh openssh-client" "ip iproute2" "unshare util-linux" "git git" "iperf3 iperf3" "dot graphviz" "busybox busybox" "tcsh tcsh" "zsh zsh" "fish fish" "chromium chromium"
soak: SYSTEM += "munged munge" "slurmctld slurmctld" "slurmd slurmd" "srun slurm-client"

# Test hosts want sshd, ip and namespaces, drawings graphviz, the probe a shell that is not bash, logins other shells;
# without root tests use what is there and say so.
system:
	@if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	  for need in $(SYSTEM); do \
	    set -- $$need; \
	    PATH="$$PATH:/usr/sbin:/sbin" command -v $$1 >/dev/null || missing="$$missing $$2"; \
	  done; \
	  if [ -n "$$missing" ]; then apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq $$missing >/dev/null; fi; \
	fi
