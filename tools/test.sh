#!/usr/bin/env bash
# lint | fast | all. The last lines are pytest's own.
set -euo pipefail
cd "$(dirname "$0")/.."
export HF_HUB_OFFLINE=1 PYTHONDONTWRITEBYTECODE=1
lint() {
  .venv/bin/ruff check .
  .venv/bin/ruff format --check .
  .venv/bin/mypy
  .venv/bin/lint-imports | tail -n 5
}
case "${1:-all}" in
  lint) lint ;;
  fast) exec .venv/bin/python -m pytest -q -m "not slow" -n 2 --dist loadfile --durations 10 ;;
  all)
    lint
    .venv/bin/python -m tools.sample_model .state/models/smollm2-135m-instruct
    .venv/bin/python -m tools.tiny_model full .state/models/tiny-full
    exec .venv/bin/python -m pytest -q --durations 25
    ;;
  *) echo "usage: $0 lint|fast|all" >&2; exit 2 ;;
esac
