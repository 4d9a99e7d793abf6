#!/usr/bin/env bash
# scripts/test.sh: the whole check. Installs missing Debian packages, then
#   dev suite (-O2), the same suite under ASan + UBSan, cache + kv + threads under TSan, and 20 s of every fuzz target.
# About half an hour on 2 cores, nothing cached. --quick: the dev suite alone. --full: also every line of the release check and docs/results/.
# Safe to run twice.
set -euo pipefail
cd "$(dirname "$0")/.."
mode=${1:-}
source scripts/packages.sh
if [ "$mode" = --full ]; then install_packages full; else install_packages test; fi

stage() { printf '\n== %s (%ss since start)\n' "$1" "$SECONDS"; }
jobs=$(nproc)

build() {  # preset [targets...]
  local preset=$1 joined=()
  shift
  # A build from nothing joins the sources of a target; one that is there goes on as it was configured.
  [ -e "build/$preset/CMakeCache.txt" ] || joined=(-DCMAKE_UNITY_BUILD=ON)
  cmake --preset "$preset" "${joined[@]}" >/dev/null
  cmake --build --preset "$preset" -j "$jobs" ${@:+--target "$@"}
}

stage "dev suite"
build dev
ctest --preset dev -j "$jobs"
[ "$mode" = --quick ] && exit 0

stage "ASan + UBSan suite"  # the same build holds the fuzz targets: all is compiled once
build asan
ctest --preset asan -j "$jobs"

stage "TSan: cache, kv and threads"
build tsan base_test pages_test owner_test kv_test
ctest --preset tsan -j "$jobs" -R '^(base|pages|owner|kv)$'

stage "fuzz targets, 20 s each"
FUZZ_DIR=build/asan scripts/fuzz.sh 20

if [ "$mode" = --full ]; then
  stage "release check"
  cmake --preset release -DLIVEQUANT_BENCH=ON >/dev/null
  cmake --build --preset release -j "$jobs"
  python3 tools/release_check.py
fi
stage "all passed"
