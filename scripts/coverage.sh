#!/usr/bin/env bash
# Line coverage of each parser by the committed corpus of its fuzz target (clang source coverage); fails below 85 %.
#
#   scripts/coverage.sh [TARGET...]       # default: every target named below; builds them into build/coverage
set -euo pipefail
cd "$(dirname "$0")/.."
# shellcheck source=scripts/packages.sh
source scripts/packages.sh

# Target and the sources that it is there for.
declare -A SOURCES=(
  [json]="src/io/json.cc"
  [safetensors]="src/io/safetensors.cc"
  [index]="src/io/safetensors.cc"
  [gguf]="src/io/gguf.cc src/model/gguf_config.cc src/model/gguf_source.cc src/text/gguf_fields.cc src/text/gguf_sentencepiece.cc src/text/gguf_tokenizer.cc"
  [loader]="src/model/fp8_weights.cc src/model/model_files.cc src/model/safetensors_source.cc src/model/weights.cc"
  [policy]="src/schema/policy.cc"
  [config]="src/model/config.cc src/model/config_fields.cc src/model/config_rope.cc"
  [tokenizer]="src/text/tokenizer_json.cc src/text/normalizer.cc src/text/pretokenizer.cc src/text/decoder.cc src/text/bpe.cc src/text/unigram.cc"
  [chat_template]="src/text/template_lexer.cc src/text/template_parser.cc src/text/template_eval.cc src/text/template_builtins.cc src/text/template_value.cc"
)
# safetensors and index read two halves of one file: their corpora count together.
targets=("$@")
[[ ${#targets[@]} -gt 0 ]] || targets=(json safetensors index gguf loader policy config tokenizer chat_template)

install_packages coverage
floor=85
build=build/coverage
llvm=/usr/lib/llvm-19/bin
cmake -S . -B $build -G Ninja -DCMAKE_BUILD_TYPE=RelWithDebInfo -DCMAKE_CXX_COMPILER=clang++-19 -DLIVEQUANT_TESTS=OFF -DLIVEQUANT_FUZZ=ON \
  -DCMAKE_CXX_FLAGS="-fprofile-instr-generate -fcoverage-mapping" -DCMAKE_CXX_FLAGS_RELWITHDEBINFO="-O0" >/dev/null
cmake --build $build -j2 --target "${targets[@]/%/_fuzz}" >/dev/null

objects=()
for name in "${targets[@]}"; do
  LLVM_PROFILE_FILE=$build/$name.profraw $build/fuzz/"${name}"_fuzz -runs=0 "fuzz/corpus/$name" >/dev/null 2>&1
  objects+=(-object "$build/fuzz/${name}_fuzz")
done
raw=()
for name in "${targets[@]}"; do raw+=("$build/$name.profraw"); done
$llvm/llvm-profdata merge -o $build/all.profdata "${raw[@]}"
status=0
for file in $(for name in "${targets[@]}"; do tr ' ' '\n' <<<"${SOURCES[$name]}"; done | sort -u); do
  lines=$($llvm/llvm-cov report "${objects[@]:1}" -instr-profile=$build/all.profdata "$file" 2>/dev/null | awk '/^TOTAL/ {print $10}')
  echo "$file $lines of lines"
  awk -v a="${lines%\%}" -v b=$floor 'BEGIN {exit !(a >= b)}' || status=1
done
[[ $status -eq 0 ]] || echo "a parser is below $floor %" >&2
exit $status
