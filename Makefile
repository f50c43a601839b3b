# `make demo` and `make test` work as the first command after a clone: they make .venv and install into it.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test test-slow lint format clean

demo: .venv/ready
	$(BIN)/kvfold demo --out demo

test: .venv/ready
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses 2 --dist loadfile

test-slow: .venv/ready
	$(BIN)/python -m pytest -m slow

lint: .venv/ready
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/python tests/type_check.py

format: .venv/ready
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt "torch" setuptools
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[dev]"
	touch $@

clean:
	rm -rf .venv build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
