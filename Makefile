# Every target but test-gpu runs in .venv, which the first one makes and the others reuse.
PYTHON ?= python3
BIN := .venv/bin
# Made last by a successful installation; older than what it was installed from, it is made anew.
STAMP := .venv/.installed

.PHONY: demo mnist nanogpt mnist-ddp nanogpt-fsdp test test-all test-rest test-again check kills ranks-kills faults fuzz council peers \
    pictures test-gpu

demo: $(STAMP)
	@$(BIN)/checkflow demo

mnist: $(STAMP)
	@$(BIN)/python examples/mnist/main_checkflow.py

nanogpt: $(STAMP)
	@$(BIN)/python examples/nanogpt/train_checkflow.py

# On two ranks.
mnist-ddp: $(STAMP)
	@$(BIN)/torchrun --standalone --nproc-per-node=2 examples/mnist/main_ddp_checkflow.py

nanogpt-fsdp: $(STAMP)
	@$(BIN)/torchrun --standalone --nproc-per-node=2 examples/nanogpt/train_fsdp_checkflow.py

# One case of each test, in some five minutes on two cores: what a change must pass before it is shown to others.
test: $(STAMP)
	@$(BIN)/pytest --numprocesses auto --dist loadfile --no-loadscope-reorder --quick

# All other cases, and those in full that `make test` shortens.
test-rest: $(STAMP)
	@$(BIN)/pytest --numprocesses auto --dist loadfile --rest

# Every case of every test.
test-all: test test-rest

# What failed in the last run, one after the other; it is an error if that was nothing. What passes now has a race: its
# name is added to tests/races.txt, and `make check` fails until the race is found and that file is empty.
test-again: $(STAMP)
	@$(BIN)/pytest --numprocesses 0 --last-failed --last-failed-no-failures none -rA --races tests/races.txt

# A training job killed KILLS times at random moments: what must hold is in tests/faults/kills/checks.py. BREAK=name takes
# something away of the runtime first (tests/faults/kills/breaks.py), and the run must fail.
KILLS ?= 200
kills: $(STAMP)
	@$(BIN)/python -m tests.faults.kills.run --kills $(KILLS) $(if $(SEED),--seed $(SEED)) $(if $(BREAK),--break $(BREAK),--output benchmarks/results/kills.json)

# Jobs of several ranks under torchrun's agent, killed or stopped KILLS times: one rank, all, or the launcher, in each
# phase. BREAK=name takes something away of their agreement first (tests/faults/ranks/breaks.py), and the run must fail.
ranks-kills: $(STAMP)
	@$(BIN)/python -m tests.faults.ranks.run --kills $(KILLS) $(if $(SEED),--seed $(SEED)) $(if $(BREAK),--break $(BREAK),--output benchmarks/results/ranks-kills.json)

# Every fault that must lose nothing, thousands of each: hours. Goes on where it was interrupted; as root, or power cuts
# are skipped. ONLY='F3 F5': these alone. SECONDS=600: begin nothing after ten minutes. FRESH=1: all anew.
faults: $(STAMP)
	@$(BIN)/python -m tests.faults.fault_run $(if $(ONLY),--only $(ONLY)) $(if $(FRESH),--fresh) $(if $(filter command line,$(origin SECONDS)),--seconds $(SECONDS)) --output benchmarks/results/faults.json --page docs/development/faults.md

# Everything that reads files gets INPUTS damaged and hostile ones: tests/faults/fuzz/run.py says what must hold. BREAK=name gives
# what reads them a fault first (tests/faults/fuzz/breaks.py), and the run must fail.
INPUTS ?= 100000
fuzz: $(STAMP)
	@$(BIN)/python -m tests.faults.fuzz.run --inputs $(INPUTS) $(if $(SEED),--seed $(SEED)) $(if $(BREAK),--break $(BREAK),--output benchmarks/results/fuzz.json)

# The agreement of several ranks on SCHEDULES simulated networks that delay, lose and cut, with ranks that die and stop.
# BREAK=name takes a check away of it first (tests/runtime/ranks/breaks.py), and the run must fail.
SCHEDULES ?= 100000
council: $(STAMP)
	@$(BIN)/python -m tests.runtime.ranks.run --schedules $(SCHEDULES) $(if $(SEED),--first $(SEED)) $(if $(BREAK),--break $(BREAK))

# checkflow beside other checkpointers, on a machine that does nothing else. ONLY='checkflow,torch.save': these alone, and the
# figures go nowhere unless OUTPUT= names a file; STATES=0.1, ROUNDS=3, KILLS=0, THREADS=1 (of training).
peers: $(STAMP)
	@$(BIN)/python -m benchmarks.peers $(if $(ONLY),--only '$(ONLY)') $(if $(STATES),--states $(STATES)) $(if $(ROUNDS),--rounds $(ROUNDS)) $(if $(THREADS),--threads $(THREADS)) $(if $(filter command line,$(origin KILLS)),--kills $(KILLS)) $(if $(OUTPUT),--output '$(OUTPUT)')

# The pictures of docs/how-to/pages.md: needs chromium and chromedriver.
pictures: $(STAMP)
	@$(BIN)/python -m docs.pictures

check: $(STAMP)
	@! test -s tests/races.txt || { echo "find the races of these tests, then empty tests/races.txt:" >&2; cat tests/races.txt >&2; exit 1; }
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	@# What only tests call: move it to tests/support. Fields are left out, since files have them. 3: vulture found something.
	@found=$$($(BIN)/vulture) || test $$? -eq 3 || exit 1; ! echo "$$found" | grep -E 'unused (class|function|method|property)'
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# What needs a GPU: with the Python and the torch that are there, and no network. WHEELS: a folder with what they lack.
# CALL=1, 2, 3: a third each, in ten minutes at most. JOIN='FILE …': what the calls before have written.
RESULTS ?= benchmarks/results
test-gpu:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "checkflow: needs Python 3.11 or newer, not $$($(PYTHON) -V 2>&1): make test-gpu PYTHON=python3.11" >&2; exit 1; }
	@PYTHONUNBUFFERED=1 $(PYTHON) -m benchmarks.gpu --output '$(RESULTS)' $(if $(WHEELS),--wheels '$(WHEELS)') $(if $(CALL),--call $(CALL)) $(if $(JOIN),--join $(JOIN))

$(STAMP): pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null || { echo "checkflow: no Python: apt-get install python3 python3-venv" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "checkflow: needs Python 3.11 or newer, not $$($(PYTHON) -V 2>&1): apt-get install python3.11 python3.11-venv, then make PYTHON=python3.11" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { echo "checkflow: Python lacks venv: apt-get install python3-venv" >&2; exit 1; }
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $@
