# make demo    trains Fashion-MNIST four times on a slow network, ends with a table and a picture
# make test    every check of this repository; `make test ONLY="ruff pytest"` runs some of them
# make lock    pins anew what requirements-dev.in asks for
.PHONY: demo test setup wheel lock clean

VENV ?= .venv
PYTHON ?= python3
export VENV PYTHON
SOURCES := $(shell find Cargo.toml Cargo.lock pyproject.toml README.md rust python -type f \
	\( -name '*.rs' -o -name '*.toml' -o -name '*.lock' -o -name '*.md' -o -name '*.py' -o -name '*.pyi' -o -name py.typed \))
WHEEL := $(VENV)/.wheel

demo: setup
	$(VENV)/bin/python examples/demo.py $(ARGS)

test: setup
	scripts/setup cargo-tools
	$(VENV)/bin/python scripts/check.py $(ONLY)

setup: wheel
	@scripts/setup system

wheel: venv
	@$(MAKE) --no-print-directory $(WHEEL)

.PHONY: venv
venv:
	@scripts/setup venv

$(WHEEL): $(SOURCES) requirements-dev.lock
	@scripts/setup wheel
	@touch $@

lock: venv
	$(VENV)/bin/uv pip compile --quiet --upgrade --universal --python-version 3.11 --no-annotate --no-header \
		requirements-dev.in -o requirements-dev.lock

clean:
	rm -rf $(VENV) target dist out
