#!/usr/bin/env bash
# lint | fast | all. The last lines are pytest's own. Two workers, a file each at a time; long files begin first.
set -euo pipefail
cd "$(dirname "$0")/.."
export HF_HUB_OFFLINE=1 PYTHONDONTWRITEBYTECODE=1
lint() {
  .venv/bin/ruff check .
  .venv/bin/ruff format --check .
  .venv/bin/mypy
  .venv/bin/lint-imports | tail -n 5
}
tests() { exec .venv/bin/python -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder "$@"; }
case "${1:-all}" in
  lint) lint ;;
  fast) tests -m "not slow" --durations 10 ;;
  all)
    lint
    .venv/bin/python -m tools.sample_model .state/models/smollm2-135m-instruct
    .venv/bin/python -m tools.tiny_model full .state/models/tiny-full
    DYNAMO_BLOB_ENGINES_LOCKED=1 tests --durations 40 # both workers may have an engine at a time
    ;;
  *) echo "usage: $0 lint|fast|all" >&2; exit 2 ;;
esac
