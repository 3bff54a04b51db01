# Two commands do everything: `make train` and `make test`. Both make the environment first when it is missing.

PYTHON ?= $(shell command -v python3.12 || command -v python3.13 || command -v python3)
RUN ?= runs/nano
INSTALLED := .venv/.installed

.PHONY: train test lint clean

train: $(INSTALLED)
	.venv/bin/python -m k3jax.train --config nano --run $(RUN)

test: $(INSTALLED)
	.venv/bin/ruff check .
	.venv/bin/python -m pytest -n 2 --dist loadgroup

lint: $(INSTALLED)
	.venv/bin/ruff check --fix .
	.venv/bin/ruff format .

$(INSTALLED): requirements.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 12))' || \
	  { echo "k3jax needs Python 3.12 or newer, but $(PYTHON) is $$($(PYTHON) --version 2>&1); set PYTHON=..."; exit 1; }
	$(PYTHON) -m venv .venv
	.venv/bin/python -m pip install --quiet --disable-pip-version-check -r requirements.txt
	@touch $@

clean:
	rm -rf .venv runs
