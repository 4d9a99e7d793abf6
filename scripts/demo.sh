#!/usr/bin/env bash
# scripts/demo.sh: from a fresh clone to an answer. Installs missing Debian packages, builds build/release/livequant, continues a real
# passage under each cache format, then prints one table: bytes, quality and speed of each. Safe to run twice.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/packages.sh
install_packages build
cmake --preset release -DLIVEQUANT_BENCH=OFF >/dev/null
cmake --build --preset release
exec build/release/livequant demo "$@"
