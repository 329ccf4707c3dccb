# Two commands do everything on a fresh machine: `make demo` and `make test`. Each sets itself up first, once.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
DEMO := demo

.PHONY: demo test test-slow check install constraints clean

demo: install
	$(BIN)/gradveil train --data fashion-mnist-mini --model mlp --epochs 10 --lr 0.02 --save-at 0,1,10 --out $(DEMO)/train
	$(BIN)/gradveil policy show 3-1-7+43-18-18 --out $(DEMO)/policy.png
	@echo
	@echo "The demo trained a small model on 2,000 embedded Fashion-MNIST images and drew the paper's hybrid policy. Look at:"
	@echo "  $(DEMO)/policy.png               what the policy does to a picture, step by step"
	@echo "  $(DEMO)/train/metrics.csv        loss and accuracy after each epoch"
	@echo "  $(DEMO)/train/model.safetensors  the weights; model.json beside it has every setting"

test: install
	$(BIN)/python -m pytest -m "not slow"

test-slow: install
	$(BIN)/python -m pytest -m slow

check: install
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy
	$(BIN)/lint-imports

install: $(INSTALLED)

# One resolve for everything: a second one could bring another torch.
$(INSTALLED): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

constraints: install
	$(BIN)/python tools/make_constraints.py

clean:
	rm -rf $(VENV) $(DEMO)
