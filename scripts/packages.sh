# scripts/packages.sh: sourced by the other scripts. Installs the Debian packages that are missing; nothing else on the
# machine is assumed. Usage: install_packages build|python|test|coverage|full
BUILD_PACKAGES=(build-essential cmake ninja-build pkg-config git libfmt-dev libsimdjson-dev nlohmann-json3-dev libcli11-dev
                libhwy-dev libssl-dev libpcre2-dev libutf8proc-dev python3)
PYTHON_PACKAGES=(pybind11-dev python3-dev)  # the Python module; without them it is not built, and configure says so
TEST_PACKAGES=(libgtest-dev libgmock-dev clang-19 libclang-rt-19-dev ccache mold "${PYTHON_PACKAGES[@]}" python3-numpy python3-pytest
               python3-pip)
COVERAGE_PACKAGES=(clang-19 libclang-rt-19-dev llvm-19)
BENCH_PACKAGES=(libbenchmark-dev libopenblas-dev)

install_packages() {
  local want=("${BUILD_PACKAGES[@]}") missing=() p
  case "$1" in
    python) want+=("${PYTHON_PACKAGES[@]}" python3-pip python3-venv) ;;
    test) want+=("${TEST_PACKAGES[@]}") ;;
    coverage) want+=("${COVERAGE_PACKAGES[@]}") ;;
    full) want+=("${TEST_PACKAGES[@]}" "${BENCH_PACKAGES[@]}") ;;
  esac
  for p in "${want[@]}"; do
    dpkg-query -W -f='${Status}' "$p" 2>/dev/null | grep -q 'ok installed' || missing+=("$p")
  done
  [ ${#missing[@]} -eq 0 ] && return 0
  local sudo=()
  if [ "$(id -u)" != 0 ]; then
    command -v sudo >/dev/null || { echo "needs root or sudo to install: ${missing[*]}" >&2; return 1; }
    sudo=(sudo)
  fi
  echo "installing ${#missing[@]} Debian packages: ${missing[*]}" >&2
  "${sudo[@]}" apt-get update -qq
  "${sudo[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
}
