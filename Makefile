# Every target works from a bare checkout with nothing but Python 3.11 or newer: PostgreSQL and Java come as wheels
# where the machine has none of its own.

PYTHON ?= python3
# a shell that forbids bytecode has every process compile gdq and its tests again
unexport PYTHONDONTWRITEBYTECODE
EXTRAS := arrow,views,spark,lake,metrics,http,nats,kafka,avro,embedded,demo,dev
# a server and its databases for each worker; three keep two cores busy, as tests wait; those of one file stay together, in the
# order of tests/conftest.py
PARALLEL := -n 3 --dist loadfile --no-loadscope-reorder
SPARK43 := 4.3.0
SOAK ?= 20000
FOREIGN_PG ?= 18
SECONDS ?= 720
SEED ?= 1
PG ?= 18
# What `make test` runs on 15: what works within the server or reads its WAL is where versions differ (triggers, event
# triggers, replica identities, output plugins), and one file asks the version. Programs send plain SQL, which
# `make test-all` runs there.
ON_15 := $(addprefix tests/,batch capture compare ddl install slot views/test_owner_sql.py)
# where `make docs` writes
SITE ?= build
# Debian's PostgreSQL 15 comes with the program that runs isolation specs
FOREIGN_SUITES_PG ?= 15

py := .venv/bin/python
say = @printf '%s\n'

.DEFAULT_GOAL := help
.PHONY: help demo docs bench bench-quick bench-long bench-all test test-all test-foreign test-published soak campaign campaign-replica lint format schema clean

help: ## show this list
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' Makefile | expand -t 12

demo: .venv/ready ## show gdq at work on an embedded server, in a minute and a half
	@$(py) -m gdq demo

docs: .venv-docs/ready ## the documentation as a site, build/site/index.html
	@.venv-docs/bin/python -m docs_site $(SITE)/docs
	@NO_MKDOCS_2_WARNING=1 GDQ_PAGES=$(abspath $(SITE)/docs) .venv-docs/bin/python -m mkdocs build --quiet --strict \
	  --config-file docs_site/mkdocs.yml --site-dir $(abspath $(SITE)/site)

bench-quick: .venv/ready ## gdq beside PgQ, Slony and a slot in two minutes; BENCH='--write FILE' for a page
	@$(py) -m bench --quick $(BENCH)

bench: .venv/ready ## the same in a quarter of an hour
	@$(py) -m bench $(BENCH)

bench-long: .venv/ready ## the same in under two hours; goes on where it was stopped
	@$(py) -m bench --long $(BENCH)

bench-all: bench ## also messages, latency, a held snapshot, many tables, monitoring, an idle queue, keys of views, views of TPC-H on both engines, replicas, spools, mirrors, relays, a huge transaction
	@$(py) -m bench.messages
	@$(py) -m bench.latency
	@$(py) -m bench.long_snapshot
	@$(py) -m bench.many_tables
	@$(py) -m bench.monitoring
	@$(py) -m bench.idle
	@$(py) -m bench.keys
	@$(py) -m bench.views --fresh
	@$(py) -m bench.replica
	@$(py) -m bench.spool
	@$(py) -m bench.mirror
	@$(py) -m bench.relay
	@$(py) -m bench.large_transaction

test: lint ## lint, all tests but the long ones on PostgreSQL 18, on 15 those of what works within the server
	@$(call pytest,18,-m 'not long' --one-spark)
	@$(call pytest,15,-m 'server and not long' $(ON_15))

test-all: lint .venv-spark43/ready ## lint, all tests on the newest and the oldest PostgreSQL, server tests between, Spark's on the newest Spark
	@$(tree); failed=; export GDQ_TEST_CLUSTER=1; \
	$(call part,18,$(call pytest,18,)); \
	$(call part,15,$(call pytest,15,)); \
	$(call part,16,$(call pytest,16,-m server)); \
	$(call part,17,$(call pytest,17,-m server)); \
	$(call part,spark,$(spark43)); \
	test -z "$$failed" || { printf 'FAILED:%s\n' "$$failed"; exit 1; }

test-published: .venv/ready ## README, every page and the demo from the wheel alone, in an empty environment, on 15 and 18
	@$(py) -m tests.published

soak: .venv/ready ## random sequences of steps for hours; SOAK=<examples>
	@GDQ_MACHINE_EXAMPLES=$(SOAK) $(py) -m pytest -q -s -m 'not long' tests/batch/test_machine.py

test-foreign: .venv/ready ## other projects' suites below FOREIGN=<folder> as views of gdq, PostgreSQL's under capture
	@$(if $(FOREIGN),,echo "make test-foreign FOREIGN=FOLDER: see docs/foreign-suites.md for what the folder holds"; exit 2)
	@$(py) -m tests.foreign views '$(FOREIGN)' --pg $(FOREIGN_PG)
	@$(py) -m tests.foreign regression '$(FOREIGN)' --pg $(FOREIGN_SUITES_PG)
	@$(py) -m tests.foreign isolation '$(FOREIGN)' --pg $(FOREIGN_SUITES_PG)

campaign: .venv/ready ## faults strike writers and consumers, each change is accounted for; SECONDS=720 SEED=1 PG=18
	@$(py) -m tests.campaign --seconds $(SECONDS) --seed $(SEED) --pg $(PG) $(CAMPAIGN)

campaign-replica: .venv/ready ## 200 kills of a replica's batches, 20 of a copy of 20,000,000 rows, half of each with two that apply; SEED=1 PG=18
	@$(py) -m tests.campaign.replicas --whole --seed $(SEED) --pg $(PG) $(CAMPAIGN)

lint: .venv/ready ## ruff, mypy, who may call whom in Python and in SQL, pgspot
	$(say) '== ruff, mypy, import-linter, folders of SQL, pgspot'
	@$(py) -m ruff check --quiet .
	@$(py) -m ruff format --quiet --check .
	@$(py) -m mypy --no-error-summary gdq pyspark_gdq tests bench docs_site
	@out=$$($(py) -c 'from importlinter.cli import lint_imports_command as lint; lint()' --no-cache --no-logo 2>&1) || { printf '%s\n' "$$out"; exit 1; }
	@$(py) -m tests.support.lint_sql_folders
	@$(py) -m tests.support.lint_sql

format: .venv/ready ## rewrite the Python files as lint wants them
	@$(py) -m ruff check --quiet --fix . ; $(py) -m ruff format .

schema: .venv/ready ## rewrite tests/install/schema.txt, the installed schema for review, and docs/names.md
	@GDQ_WRITE_SCHEMA=1 $(py) -m pytest -q tests/install/test_schema.py tests/docs_and_bench/test_names.py

clean: ## remove what the other targets made in this folder
	rm -rf .venv .venv-* build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis spark-warehouse

# pytest on one PostgreSQL; a major that this machine cannot get is passed over, in one clear line.
define pytest
{ printf '== PostgreSQL %s\n' "$(1) $(2)"; \
$(py) -m gdq.embedded $(1) >/dev/null; found=$$?; \
if [ $$found -eq 0 ]; then $(py) -m pytest -q $(PARALLEL) --pg $(1) $(2); \
elif [ $$found -eq 3 ] && [ $(1) != 18 ]; then printf 'PASSED OVER: PostgreSQL %s\n' $(1); \
else exit $$found; fi; }
endef

define spark43
{ printf '== Spark %s\n' '$(SPARK43)'; .venv-spark43/bin/python -m pytest -q -n 2 --dist loadfile -m spark; }
endef

# A part of test-all. Hours of tests can be stopped and go on: what passed is not run again while the tree is the same.
# A tree with changes that are not committed has no name; all is run.
tree = tree=$$(test -z "$$(git status --porcelain 2>&1)" && git rev-parse 'HEAD^{tree}')
define part
if [ "$$tree" ] && [ -e "build/test-all/$$tree/$(1)" ]; then printf '== %s passed before\n' '$(1)'; \
elif $(2); then test -z "$$tree" || { mkdir -p "build/test-all/$$tree" && touch "build/test-all/$$tree/$(1)"; }; \
else failed="$$failed $(1)"; fi
endef

.venv/ready: pyproject.toml constraints.txt
	$(say) '== Python environment .venv (half a gigabyte, once)'
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "gdq needs Python 3.11 or newer: make PYTHON=python3.x")'
	@$(PYTHON) -m venv .venv
	@$(py) -m pip install --quiet --upgrade pip
	@$(py) -m pip install --quiet --constraint constraints.txt --editable '.[$(EXTRAS)]'
	@touch $@

.venv-docs/ready: pyproject.toml constraints.txt
	$(say) '== Python environment .venv-docs'
	@$(PYTHON) -m venv .venv-docs
	@.venv-docs/bin/python -m pip install --quiet --upgrade pip
	@.venv-docs/bin/python -m pip install --quiet --constraint constraints.txt --editable '.[docs]'
	@touch $@

.venv-browser/ready: pyproject.toml constraints.txt
	$(say) '== Python environment .venv-browser'
	@$(PYTHON) -m venv .venv-browser
	@.venv-browser/bin/python -m pip install --quiet --upgrade pip
	@.venv-browser/bin/python -m pip install --quiet --constraint constraints.txt --group browser
	@touch $@

.venv-spark43/ready: pyproject.toml constraints.txt
	$(say) '== Python environment .venv-spark43'
	@$(PYTHON) -m venv .venv-spark43
	@.venv-spark43/bin/python -m pip install --quiet --upgrade pip
	@sed '/^pyspark==/d;/^py4j==/d' constraints.txt > .venv-spark43/constraints.txt
	@.venv-spark43/bin/python -m pip install --quiet --constraint .venv-spark43/constraints.txt \
	    --editable '.[$(EXTRAS)]' 'pyspark==$(SPARK43)'
	@touch $@
