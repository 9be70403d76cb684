# The recipes people and CI use. `make help` lists them.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

# Where cargo puts things, also when it was told to put them elsewhere.
TARGET := $(or $(CARGO_TARGET_DIR),target)
DATA_DIR ?= .tidemark
ARGS ?=
BIN := $(TARGET)/fast/tidemark
MEASURED := $(TARGET)/measured/tidemark

export TIDEMARK_TOOLS ?= $(CURDIR)/.tools

.PHONY: help
help: ## List the targets
	@awk 'BEGIN { FS = ":.*## " } /^[a-zA-Z0-9%_-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

.PHONY: dev
dev: setup build ## Run everything on a private Postgres and a simulated chain (ARGS="--rpc URL")
	@exec $(BIN) dev --data-dir $(DATA_DIR) $(ARGS)

.PHONY: build
build: ## Build the binary as a newcomer wants it: soon (`cargo build --release` for the fastest one)
	@echo "==> building tidemark ($(BIN))"
	@cargo build --locked --profile fast -p tidemark

.PHONY: node
node: build ## Run the simulated node alone (ARGS="--seed 7")
	@exec $(BIN) sim $(ARGS)

.PHONY: test
test: setup-test ## Install what testing needs, run every test, print the summary
	@cargo nextest run --locked --workspace --profile ci $(ARGS)

.PHONY: sim
sim: setup-test ## The ledger's simulation with more seeds (SEEDS=20000 FROM=0), or one with its trace (SEED=7)
	@TIDEMARK_SIM_SEEDS=$(SEEDS) TIDEMARK_SIM_FROM=$(FROM) TIDEMARK_SIM_SEED=$(SEED) \
	  cargo nextest run --locked -p tidemark-pipeline --test simulation --profile sim \
	  $(if $(SEED),--no-capture,--success-output final) $(ARGS)

.PHONY: e2e
e2e: setup-test ## Only the end-to-end tests: whole pipelines and the browser
	@TIDEMARK_SCHEMATHESIS=full cargo nextest run --locked -p tidemark --profile ci -E 'kind(test) & not binary(tidy)' $(ARGS)

.PHONY: check
check: ## Format, clippy, licences and bans, tidy
	@cargo fmt --all --check
	@cargo clippy --locked --workspace --all-targets -- -D warnings
	@if cargo deny --version >/dev/null 2>&1; then cargo deny --log-level error check bans licenses sources; \
	  else echo "cargo-deny is not installed, its part is left out (cargo install --locked cargo-deny)"; fi
	@cargo test --locked --quiet -p tidemark --test tidy

.PHONY: measured
measured: ## Build the binary that is measured: a release without the slow link
	@echo "==> building tidemark ($(MEASURED))"
	@cargo build --locked --profile measured -p tidemark

.PHONY: bench
bench: measured ## All benchmarks, one after another (bench-NAME: one); tables here, JSON in target/bench
	@mkdir -p $(TARGET)/bench
	@exec $(MEASURED) bench all --out $(TARGET)/bench $(ARGS)

bench-%: measured ## One benchmark
	@mkdir -p $(TARGET)/bench
	@exec $(MEASURED) bench $* --out $(TARGET)/bench $(ARGS)

.PHONY: soak
soak: build ## Run `dev` with random kills for an hour; nothing lost, tables flat (MINUTES=60)
	@scripts/soak.sh $(BIN) $(or $(MINUTES),60)

.PHONY: profile
profile: ## A flame graph of a history sync, or of ARGS="any command"
	@scripts/profile.sh $(ARGS)

.PHONY: db
db: ## psql into the database of `make dev` (ARGS='-c "select 1"')
	@DATA_DIR=$(DATA_DIR) scripts/db.sh $(ARGS)

.PHONY: bless
bless: setup-test ## Accept snapshots and regenerate committed generated files
	@TIDEMARK_BLESS=1 INSTA_UPDATE=always cargo nextest run --locked --workspace $(ARGS)
	@git status --short

.PHONY: shape
shape: ## The longest files and functions per crate
	@scripts/shape.sh

.PHONY: hooks
hooks: ## Install the commit hook: format, clippy on touched crates, tidy
	@install -m 755 scripts/pre-commit "$$(git rev-parse --git-path hooks)/pre-commit"
	@echo "installed the commit hook"

.PHONY: setup
setup: ## Install what running needs: Postgres server binaries, only if missing
	@scripts/setup.sh run

.PHONY: setup-test
setup-test: ## Install what testing needs: Postgres, Redis, NATS, schemathesis, anvil, solc, Chromium, nextest
	@scripts/setup.sh test
