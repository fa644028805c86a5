#!/usr/bin/env bash
# lint | fast | all. The last lines are pytest's own: one run of two workers without engines, one run of engines and graphs.
set -uo pipefail
cd "$(dirname "$0")/.."
export HF_HUB_OFFLINE=1 PYTHONDONTWRITEBYTECODE=1
lint() {
  .venv/bin/ruff check . && .venv/bin/ruff format --check . && .venv/bin/mypy && .venv/bin/lint-imports | tail -n 5
}
fast() { .venv/bin/python -m pytest -q -m "not slow" -n 2 --dist loadfile --durations 15 "$@"; }
case "${1:-all}" in
  lint) lint ;;
  fast) fast ;;
  all)
    lint || exit
    .venv/bin/python -m tools.sample_model .state/models/smollm2-135m-instruct || exit
    .venv/bin/python -m tools.tiny_model full .state/models/tiny-full || exit
    said=$(mktemp) && trap 'rm -f "$said"' EXIT
    fast | tee "$said"
    first=$?
    .venv/bin/python -m pytest -q -m slow --durations 25 # engines have the machine to themselves
    second=$?
    echo "--- closing lines of the first run (no engines):"
    sed -n '/^=* short test summary/,$p' "$said" | grep . || tail -n 1 "$said"
    exit $((first || second))
    ;;
  *) echo "usage: $0 lint|fast|all" >&2; exit 2 ;;
esac
