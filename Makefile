# `make quickstart` and `make test` do all the set-up by themselves: a virtual environment in .venv, versions from
# constraints.txt. Needs Python >= 3.11, make and a compiler (torch.compile and a few wheels may want one).
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: quickstart test test-full lint format clean

quickstart: $(READY)
	$(BIN)/accelerate launch --quiet --num_processes 1 --num_machines 1 --mixed_precision no --dynamo_backend no recipes/quickstart.py

test: lint
	$(BIN)/python -m pytest -q -m "not full" --durations=10

test-full: lint
	$(BIN)/python -m pytest -q --durations=20

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@# mypy does not follow setuptools' package-dir: give it the packages where an installed wheel has them.
	@rm -rf build/typed && mkdir -p build/typed/mpp && ln -sfn ../../../eval build/typed/mpp/eval && ln -sfn ../../../recipes build/typed/mpp/recipes
	@for part in mpp/*; do ln -sfn ../../../$$part build/typed/$$part; done
	MYPYPATH=build/typed $(BIN)/mypy -p mpp

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# uv installs in seconds what pip takes minutes for; it comes from the package index like everything else.
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "error: mpp needs Python >= 3.11, and $(PYTHON) is older; try: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 2; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt uv
	$(BIN)/uv pip install --quiet --python $(BIN)/python --constraint constraints.txt --editable ".[dev]"
	touch $(READY)

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache
