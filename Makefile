# Two commands do everything: `make demo` and `make test`. Both set up .venv first.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.DEFAULT_GOAL := help

.PHONY: help
help: ## Show these targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1|/' \
	  | awk -F'|' '{ printf "make %-15s %s\n", $$1, $$2 }'

$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "Coterie needs Python 3.11 or newer; set PYTHON=..." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,mqtt]'
	@touch $@

.PHONY: install
install: $(INSTALLED) ## Make .venv and install Coterie in it

.PHONY: demo
demo: $(INSTALLED) ## Eight peers learn handwriting together
	$(BIN)/coterie swarm configs/digits.toml

.PHONY: test
test: lint ## Lint, check types and imports, run the test suite
	$(BIN)/pytest

.PHONY: lint
lint: $(INSTALLED)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

.PHONY: bench
bench: $(INSTALLED) ## Measure speed and memory; writes bench.json (only=transport or only=swarm)
	$(BIN)/python tests/bench/run.py $(only)

FASHION_MNIST := data/fashion-mnist
FASHION_MNIST_FILES := train-images-idx3-ubyte.gz train-labels-idx1-ubyte.gz \
	t10k-images-idx3-ubyte.gz t10k-labels-idx1-ubyte.gz

.PHONY: fashion-mnist
fashion-mnist: ## Fetch Fashion-MNIST from Debian's package dataset-fashion-mnist, without root
	@for folder in $(FASHION_MNIST) /usr/share/datasets/fashion-mnist; do \
	  missing=; for file in $(FASHION_MNIST_FILES); do \
	    test -f $$folder/$$file || missing=yes; done; \
	  test -n "$$missing" || { echo "Fashion-MNIST is in $$folder"; exit 0; }; \
	done; \
	for tool in apt-get apt-cache dpkg-deb; do command -v $$tool >/dev/null || { \
	  echo "make fashion-mnist needs $$tool, as Debian and Ubuntu have it;" \
	    "elsewhere set download = true in the config" >&2; exit 1; }; done; \
	mkdir -p data && work=$$(mktemp -d "$$PWD/data/fetching.XXXXXX") || exit 1; \
	trap 'rm -rf "$$work"' EXIT; trap 'exit 1' HUP INT TERM; \
	apt-cache show dataset-fashion-mnist >/dev/null 2>&1 || { \
	  echo "apt does not know the package dataset-fashion-mnist:" \
	    "run 'sudo apt-get update', then 'make fashion-mnist' again;" \
	    "without root, set download = true in the config" >&2; exit 1; }; \
	echo "Fetching dataset-fashion-mnist (31 MB)"; \
	(cd "$$work" && apt-get download dataset-fashion-mnist && dpkg-deb -x ./*.deb .) \
	  >"$$work/log" 2>&1 || { cat "$$work/log" >&2; \
	  echo "The package could not be fetched: see above; or run 'sudo apt-get update' first," \
	    "or set download = true in the config" >&2; exit 1; }; \
	mkdir -p $(FASHION_MNIST) && \
	mv "$$work"/usr/share/datasets/fashion-mnist/*.gz $(FASHION_MNIST)/ && \
	echo "Fashion-MNIST is in $(FASHION_MNIST)"
