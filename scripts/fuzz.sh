#!/usr/bin/env bash
# Runs every fuzz target that build/fuzz holds, each for SECONDS on a copy of its corpus; fails on the first crash.
#
#   cmake --preset fuzz && cmake --build --preset fuzz     # builds; this script does not
#   scripts/fuzz.sh SECONDS [TARGET...]                    # FUZZ_DIR=... for another build directory
#
# Limits are those of one input: 2 GB of memory, 64 MB in one allocation, 10 s (the machine may be busy). What a run finds
# goes to a temporary folder that is named when it crashes and removed when it does not; fuzz/corpus is never written.
set -euo pipefail
cd "$(dirname "$0")/.."

if [[ $# -lt 1 || ! $1 =~ ^[1-9][0-9]*$ ]]; then
  echo "usage: scripts/fuzz.sh SECONDS [TARGET...]" >&2
  exit 2
fi
seconds=$1
shift
build=${FUZZ_DIR:-build/fuzz}

targets=()
if [[ $# -gt 0 ]]; then
  for name in "$@"; do targets+=("$build/fuzz/${name}_fuzz"); done
else
  for program in "$build"/fuzz/*_fuzz; do
    if [[ -f $program && -x $program ]]; then targets+=("$program"); fi
  done
fi
if [[ ${#targets[@]} -eq 0 ]]; then
  echo "no fuzz target in $build/fuzz: build them with cmake --preset fuzz && cmake --build --preset fuzz" >&2
  exit 1
fi

work=$(mktemp -d)
fuzz_one() {  # prints one line; 1 if the target crashed
  local program=$1 name
  name=$(basename "$program" _fuzz)
  mkdir -p "$work/$name/corpus"
  if [[ -d fuzz/corpus/$name ]]; then cp -r "fuzz/corpus/$name/." "$work/$name/corpus/"; fi
  if ! "$program" -max_total_time="$seconds" -timeout=10 -rss_limit_mb=2048 -malloc_limit_mb=64 -print_final_stats=1 \
    -artifact_prefix="$work/$name/" "$work/$name/corpus" >"$work/$name/log" 2>&1; then
    tail -n 60 "$work/$name/log" >&2
    echo "$name: CRASH; input and log in $work/$name" >&2
    return 1
  fi
  local executions rate
  executions=$(sed -n 's/^stat::number_of_executed_units: *//p' "$work/$name/log")
  rate=$(sed -n 's/^stat::average_exec_per_sec: *//p' "$work/$name/log")
  echo "$name: $executions executions, $rate/s, no crash"
}

for program in "${targets[@]}"; do
  if [[ ! -x $program ]]; then
    echo "$program is not built" >&2
    exit 1
  fi
done
# As many at a time as there are cores; each has its own time.
failed=0
for program in "${targets[@]}"; do
  while [[ $(jobs -rp | wc -l) -ge $(nproc) ]]; do wait -n || failed=1; done
  fuzz_one "$program" &
done
while [[ $(jobs -p | wc -l) -gt 0 ]]; do wait -n || failed=1; done
if [[ $failed -ne 0 ]]; then exit 1; fi
rm -rf "$work"
