#!/usr/bin/env bash
# Builds the CUDA library on a machine with an NVIDIA GPU, runs the contract suite and the op tests
# there, then the sanitizers on the tiny engine, and prints a table last. Needs nvcc, CMake, ninja
# and a Python with nanobind, nlohmann-json, numpy, pydantic, pytest, safetensors, tokenizers, tqdm;
# the table of launches also needs torch. Nothing is installed.
#
#   tools/device_check.sh [all|build|contract|sanitizer|rounds]...   results: build/device/
set -uo pipefail
cd "$(dirname "$0")/.."

PYTHON=${PYTHON:-python3}
BUILD=build/device
ARCHITECTURES=${ARCHITECTURES:-90a}
parts=("$@")
((${#parts[@]})) || parts=(all)
mkdir -p "$BUILD"
: >"$BUILD/table.md"

wanted() {
  local part
  for part in "${parts[@]}"; do [[ $part == "$1" || $part == all ]] && return 0; done
  return 1
}

# step NAME COMMAND...: runs it, logs it, adds a line to the table.
step() {
  local name=$1 begin=$SECONDS status=OK
  shift
  echo "== $name"
  "$@" >"$BUILD/$name.log" 2>&1 || status=FAIL
  tail -n "${TAIL:-4}" "$BUILD/$name.log"
  [[ $status == OK ]] || failed=1
  printf '| %s | %s | %d s | %s |\n' "$name" "$status" $((SECONDS - begin)) \
    "$(grep -E '[0-9]+ passed|ERROR SUMMARY|RACECHECK SUMMARY' "$BUILD/$name.log" | tail -n 1 | tr -d '=|')" \
    >>"$BUILD/table.md"
}

build() {
  cmake -G Ninja -S . -B "$BUILD/cmake" -DCMAKE_BUILD_TYPE=Release -DDELTAFLASH_CUDA=ON \
    "-DCMAKE_CUDA_ARCHITECTURES=$ARCHITECTURES" "-DPython_EXECUTABLE=$(command -v "$PYTHON")" &&
    cmake --build "$BUILD/cmake" &&
    cmake --install "$BUILD/cmake" --prefix "$BUILD/site" &&
    cp "$BUILD"/site/runtime/*.so runtime/
}

failed=0
export PYTHONPATH="$PWD:$PWD/tests${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
wanted build && step build build
wanted contract && TAIL=12 step contract "$PYTHON" -m pytest -q -rs -s -m gpu --require-gpu tests/contract tests/plugins
if wanted sanitizer; then
  for tool in memcheck racecheck; do
    step "$tool" compute-sanitizer --tool "$tool" --error-exitcode 9 \
      "$PYTHON" tests/contract/sanitizer_session.py
  done
fi
wanted rounds && TAIL=12 step rounds "$PYTHON" tests/bench/bench_round.py

echo
"$PYTHON" -c 'import subprocess; print(subprocess.run(["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"], capture_output=True, text=True).stdout.strip())'
echo "| step | result | time | summary |"
echo "|---|---|--:|---|"
cat "$BUILD/table.md"
exit "$failed"
