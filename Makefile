# `make serve` and `make test` are all a fresh machine needs: Python >= 3.11, make and git.
SHELL := /bin/bash
QUESTION ?=
GRAPH ?= graphs/disagg.yaml
PY := .venv/bin/python

.PHONY: install serve test test-fast test-cluster check clean
install:            ## set up .venv and .state/node from the lock files
	@tools/install.sh

serve: install      ## the main job: publish the sample model if needed, start the graph, answer
	@.venv/bin/dynamo serve $(GRAPH)

test: install       ## everything: lint, types, layers, all tests
	@tools/test.sh all

test-fast: install  ## no real engines: about eight minutes on two cores
	@tools/test.sh fast

test-cluster: install  ## cluster planes for real: etcd and NATS on loopback
	@tools/cluster_planes.sh && $(PY) -m pytest -q tests/promises/test_p1_cluster_planes.py tests/cases/test_case_43_lease_loss.py tests/unit/test_announce.py tests/unit/test_check_live.py

check: install      ## lint, types and layers only
	@tools/test.sh lint

clean:              ## stop what runs, remove state (models, runs, the embedded store)
	@[ ! -x .venv/bin/dynamo ] || .venv/bin/dynamo stop --all || true
	@rm -rf .state build
