# The commands of the course. `make` alone lists them.
#
# .venv is made by the first command that needs it. Its stamp, written only after a complete installation, holds a
# checksum of pyproject.toml and constraints.txt: no stamp means a half-made .venv, which is made again; another checksum
# means that the requirements changed, and they are installed again. A .venv that lost a package is made again too.

PYTHON ?= python3
JOBS ?= auto
RUN := .venv/bin/python
EXTRAS := course,test,book
KERNEL_TESTS := $(patsubst %,tests/test_%.py,gpu mutants forward forward_steps backward backward_atomic mods tiles fused_softmax decode)
# Ends with 0 if every package that pip recorded still lies where it was put.
COMPLETE := $(RUN) -c 'import importlib.metadata as m, re, sys; \
	sys.exit(not all(d.locate_file(f).exists() for d in m.distributions() \
	for f in re.findall(r"^\w+(?:/__init__)?\.py(?=,)", d.read_text("RECORD") or "", re.M)))' 2>/dev/null
# Of what pip prints, the large downloads; warnings and errors are on stderr and are all shown.
BRIEF := awk '/^ *Downloading .*MB\)/ {print "  " $$1, $$2, $$3, $$4; fflush()} \
	/^Installing collected/ {print "  Installing", NF - 3, "packages"; fflush()}'
NBVAL := --nbval --nbval-current-env --nbval-sanitize-with tests/nbval.cfg --nbval-cell-timeout 120 \
	--nbval-kernel-startup-timeout 120 --every-cell

.DEFAULT_GOAL := help
.PHONY: help venv course lab test gpu-test compile-test bench book notebooks lint clean

help: ## list the commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-13s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

lab: venv ## open JupyterLab on workbook/, your own copy of the notebooks
	@$(RUN) book/course.py lab

course: venv ## execute every notebook into _build/ and build the book from them
	@$(RUN) book/course.py course

test: lint ## lint, unit tests, notebooks compared with their stored outputs, tests of the book
	$(RUN) -m pytest -q -n $(JOBS) --maxprocesses 8 --dist loadfile $(NBVAL) tests notebooks

gpu-test: venv ## on a machine with a GPU: every test of the kernels, compiled, in full
	$(RUN) -m pytest -n $(JOBS) --maxprocesses 16 -q -m "not compile" $(KERNEL_TESTS)

compile-test: venv ## compile the whole table of tiles for every card, GPU or not (long)
	$(RUN) -m pytest -n $(JOBS) --maxprocesses 8 -q -rP -m compile tests

bench: venv ## on a machine with a GPU: time flashlib beside the kernels found there: a CSV, a table, a chart
	$(RUN) -m flashlib.bench attention

book: venv ## build the book from the outputs stored in notebooks/
	@$(RUN) book/course.py book

notebooks: venv ## for authors: execute notebooks/ in place, update their minutes and the table in README.md
	@$(RUN) book/course.py notebooks

lint: venv ## check style and format
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .

clean: ## remove _build/ and .venv (workbook/ is yours and stays)
	rm -rf _build .venv

venv:
	@stamp="$$(cat pyproject.toml constraints.txt | cksum) $(CURDIR)"; \
	if [ "$$(cat .venv/installed 2>/dev/null)" = "$$stamp" ] && $(COMPLETE); then exit 0; fi; \
	if [ ! -f .venv/installed ] || ! $(COMPLETE); then \
		$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
			echo "PYTHON must be Python 3.11 or newer, got $(PYTHON): $$($(PYTHON) --version 2>&1 | head -n 1). Try: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 1; }; \
		$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
			echo "$(PYTHON) cannot make a virtual environment. On Debian and Ubuntu: apt-get install python3-venv" >&2; exit 1; }; \
		echo "Making .venv (a few minutes, once; about 150 packages):"; \
		rm -rf .venv && $(PYTHON) -m venv .venv || exit 1; \
	fi; \
	rm -f .venv/installed .venv/complete; \
	{ $(RUN) -m pip install --disable-pip-version-check --progress-bar off -c constraints.txt -e ".[$(EXTRAS)]" \
		&& echo "$$stamp" > .venv/complete; } | $(BRIEF); \
	mv .venv/complete .venv/installed 2>/dev/null || { \
		echo "The installation failed; the lines above say why. Run the command again once that is mended." >&2; exit 1; }
