# Thin lines over tools/: bootstrap.py makes .venv once and then returns at once.
PYTHON ?= python3
ARGS ?=
BOOTSTRAP = $(PYTHON) tools/bootstrap.py
BIN = .venv/bin
unexport PYTHONDONTWRITEBYTECODE  # with it each process of a test compiles all Python that it imports

.PHONY: help demo check test gpu mutants lint format stale docs ci bench fuzz clean

help:
	@echo "make demo     set up, then answer a question with a packed model"
	@echo "make check    the quick tests, without a compiler, a case in 20 of each: 3 to 4 minutes of processor time"
	@echo "make test     set up, then run all tests         ARGS='-k q4_0'"
	@echo "make gpu      on a GPU: its tests, which write the ledger"
	@echo "make mutants  plant bugs, each of which a test must catch"
	@echo "make lint     ruff, clang-format, mypy, plain English"
	@echo "make format   rewrite the sources by ruff and clang-format"
	@echo "make stale    results that older kernels gave"
	@echo "make docs     the documentation site, in build/site"
	@echo "make ci       all that a change must pass: .ci/run"
	@echo "make bench    measure this machine               ARGS='--cpu'"
	@echo "make fuzz     damage files of every kind      ARGS='--minutes 10'"
	@echo "make clean    remove .venv, caches and built files"

demo:
	$(BOOTSTRAP) demo
	$(BIN)/python tools/demo.py $(ARGS)

check:  # markers of pyproject.toml exclude slow tests; properties draw few examples
	$(BOOTSTRAP) test
	$(BIN)/python -m pytest -q -n auto --maxprocesses 8 --ignore=tests/gpu --hypothesis-profile quick --one-in 20 \
		-m "not (compiles or slow)" $(ARGS)

test:  # more than 8 workers gain little, and on a GPU machine they all share one device
	$(BOOTSTRAP) test
	$(BIN)/python -m pytest -n auto --maxprocesses 8 $(ARGS)

gpu:  # compiles the kernels of the tests, runs pytest -m gpu on all GPUs, writes tests/gpu_ledger.json
	$(BOOTSTRAP) test
	$(BIN)/python tools/gpu_tests.py $(ARGS)

mutants:
	$(BOOTSTRAP) test
	$(BIN)/python tools/mutants.py $(ARGS)

lint:
	$(BOOTSTRAP) lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	find kernels tests/data/kernels -name '*.cu' -o -name '*.cuh' -o -name '*.[ch]' | xargs -r $(BIN)/clang-format --dry-run -Werror
	! grep -rnE '.{121}' kernels tests/data/kernels  # comments too: clang-format does not break them
	$(BIN)/mypy
	$(BIN)/python tools/plain_english.py

format:
	$(BOOTSTRAP) lint
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	find kernels tests/data/kernels -name '*.cu' -o -name '*.cuh' -o -name '*.[ch]' | xargs -r $(BIN)/clang-format -i

stale:
	$(BOOTSTRAP)
	$(BIN)/python -m benchmarks.stale

docs:  # strict: a broken link or an unknown name is an error
	$(BOOTSTRAP) docs
	$(BIN)/python -m mkdocs build

ci:
	.ci/run $(ARGS)

bench:
	$(BOOTSTRAP)
	$(BIN)/python -m benchmarks $(ARGS)

fuzz:
	$(BOOTSTRAP) test
	$(BIN)/python tools/fuzz.py $(ARGS)

clean:
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist
	find qgemm benchmarks tests tools -name __pycache__ -prune -exec rm -rf {} +
