# Two commands do everything on a fresh machine: `make demo` and `make test`. Each sets itself up first, once.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
DEMO := demo

.PHONY: demo test test-slow fuzz check results docs notebooks install constraints clean

demo: install
	$(BIN)/gradveil train --data fashion-mnist-mini --model lenet --epochs 15 --lr 0.01 --no-augment --save-at 0,1,10 --out $(DEMO)/train
	$(BIN)/gradveil audit --data fashion-mnist-mini --model lenet --checkpoint $(DEMO)/train/model.safetensors --attack adam-cosine --steps 300 --images 8 --out $(DEMO)/audit
	$(BIN)/gradveil search --data fashion-mnist-mini --model lenet --checkpoint $(DEMO)/train/model.safetensors --trials 12 --keep 3 --images 6 --probe-steps 30 --audit-images 8 --audit-steps 100 --out $(DEMO)/search
	$(BIN)/gradveil policy show 3-1-7+43-18-18 --out $(DEMO)/policy.png
	@echo
	@echo "The demo trained a small model on 2,000 embedded Fashion-MNIST images, attacked the gradients of 8 test images, and searched a dozen"
	@echo "policies for one that protects them (a real search draws 1,500, on more images: gradveil search --help). Look at:"
	@echo "  $(DEMO)/audit/index.html                              the page of the audit, and $(DEMO)/search/index.html that of the search"
	@echo "  $(DEMO)/audit/none/pictures/grid-adam-cosine.png      the images, and what a server makes of their gradients"
	@echo "  $(DEMO)/audit/none/pictures/frames-adam-cosine.png    how the pictures come out, iteration by iteration"
	@echo "  $(DEMO)/audit/none/records.jsonl                      every figure of the table above, image by image, controls included"
	@echo "  $(DEMO)/search/policies.toml                          the policies the search kept; --defense $(DEMO)/search/policies.toml uses them"
	@echo "  $(DEMO)/policy.png                                    what the paper's hybrid policy does to a picture"
	@echo "  $(DEMO)/train/metrics.csv                             loss and accuracy after each epoch"

# Bytecode is written whatever the environment says: tests start many processes.
test: export PYTHONDONTWRITEBYTECODE :=
test: install
	$(BIN)/python -m pytest -n 2 --dist loadscope --no-loadscope-reorder -m "not slow"

test-slow: install
	$(BIN)/python -m pytest -m slow

fuzz: install
	$(BIN)/python -m pytest tests/fuzz

check: install
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy
	$(BIN)/lint-imports

# RESULTS.md and the figures of docs/ from the records under benchmarks/results; a test fails when they are not current.
results: install
	$(BIN)/python tools/make_results.py

# The documentation into build/site; a broken link or an API name that is gone is an error.
docs: install
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

# The notebooks again, with their outputs; commit them.
notebooks: install
	$(BIN)/python tools/run_notebooks.py

install: $(INSTALLED)

# One resolve for everything: a second one could bring another torch.
$(INSTALLED): pyproject.toml constraints.txt
	@echo "setting up $(VENV): some minutes, and a few GB with torch"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,docs,search,cluster,dp,flower]'
	touch $@

constraints: install
	$(BIN)/python tools/make_constraints.py

clean:
	rm -rf $(VENV) $(DEMO)
