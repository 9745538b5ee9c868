#!/usr/bin/env bash
# Builds the CUDA library on a machine with an NVIDIA GPU, runs the contract suite and the op tests
# there, then the sanitizers on the tiny engines, and prints a table last. Needs nvcc, CMake, ninja
# and a Python with nanobind, nlohmann-json, numpy, pydantic, pytest, safetensors, tokenizers, tqdm;
# the table of launches also needs torch. Nothing is installed.
#
#   tools/device_check.sh [all|build|contract|sanitizer|rounds]...   results: build/device/
#
# racecheck keeps a record of every access in host memory, about 1.4 GB a second: the session is cut
# into parts of some 40 s, a process each, RACECHECK_JOBS (2) of them at a time.
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

# session TOOL CHECKPOINT PROVIDER PART: one part under a sanitizer; its log ends with its status.
session() {
  local log
  log="$BUILD/$(IFS=.; echo "$*").log"
  compute-sanitizer --tool "$1" --error-exitcode 9 \
    "$PYTHON" tests/contract/sanitizer_session.py "${@:2}" >"$log" 2>&1
  echo "status $?" >>"$log"
}

# verdict LOG PART: what became of a part, nothing if all is well.
verdict() {
  local status
  status=$(sed -n '$s/^status //p' "$1" 2>/dev/null)
  if [[ -z $status ]]; then
    echo "no status: its runner was killed"
  elif ((status > 128)); then
    echo "killed by signal $((status - 128))"
  elif ((status != 0)); then
    echo "exit status $status, $(grep -E 'SUMMARY' "$1" | tail -n 1 | tr -d '=|' | xargs)"
  elif ! grep -qE 'SUMMARY: 0 (errors|hazards)' "$1"; then
    echo "no summary of 0 errors"
  elif ! grep -qx "$2 done" "$1"; then
    echo "did not end its session"
  fi
}

# sanitize TOOL JOBS: all parts, JOBS at a time, and one line of the table.
sanitize() {
  local tool=$1 begin=$SECONDS status=OK checkpoint provider part problem parts=() bad=()
  for checkpoint in tiny_qwen3_5 tiny_ratio3; do
    for provider in ${PROVIDERS:-exact cublaslt}; do
      for part in greedy sampled drafted; do parts+=("$checkpoint $provider $part"); done
    done
  done
  echo "== $tool"
  rm -f "$BUILD/$tool".*.log
  printf '%s\n' "${parts[@]}" |
    xargs -P "$2" -I{} bash -c 'session '"$tool"' {}'
  for part in "${parts[@]}"; do
    problem=$(verdict "$BUILD/$tool.${part// /.}.log" "$part")
    if [[ -n $problem ]]; then bad+=("$part: $problem"); fi
  done
  ((${#bad[@]} == 0)) || status=FAIL failed=1
  ((${#bad[@]} == 0)) || printf '%s\n' "${bad[@]}"
  printf '| %s | %s | %d s | %d of %d parts clean%s |\n' "$tool" "$status" $((SECONDS - begin)) \
    $((${#parts[@]} - ${#bad[@]})) "${#parts[@]}" "$(printf '; %s' "${bad[@]}")" |
    sed 's/ clean;  |$/ clean |/' >>"$BUILD/table.md"
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
  export -f session
  export BUILD PYTHON
  sanitize memcheck "${MEMCHECK_JOBS:-3}"
  sanitize racecheck "${RACECHECK_JOBS:-2}"
fi
wanted rounds && TAIL=12 step rounds "$PYTHON" tests/bench/bench_round.py

echo
"$PYTHON" -c 'import subprocess; print(subprocess.run(["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"], capture_output=True, text=True).stdout.strip())'
echo "| step | result | time | summary |"
echo "|---|---|--:|---|"
cat "$BUILD/table.md"
exit "$failed"
