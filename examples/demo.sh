#!/usr/bin/env bash
# From a checkpoint to a streamed answer: packs the tiny checkpoint of the tests into an engine
# directory, serves it on a free port of this machine, streams one completion, stops the server.
#   examples/demo.sh [PROMPT]
# CHECKPOINT and DEMO_DIR choose another checkpoint and another folder for what is written.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
checkpoint=${CHECKPOINT:-$root/tests/data/tiny_qwen3_5}
folder=${DEMO_DIR:-$root/demo}
prompt=${*:-The quick brown fox}

say() { printf '== %s\n' "$*"; }

mkdir -p "$folder"
rm -rf "$folder/engine" "$folder/ready.json"
say "pack $checkpoint"
build_engine pack "$checkpoint" "$folder/engine"

say "serve it; the log is $folder/server.log"
deltaflash serve "$folder/engine" --port 0 --ready-file "$folder/ready.json" >"$folder/server.log" 2>&1 &
server=$!
trap 'kill "$server" 2>/dev/null || true' EXIT
for ((i = 0; i < 600; ++i)); do
  [[ ! -s $folder/ready.json ]] || break
  kill -0 "$server" 2>/dev/null || {
    say "the server ended before it served:" >&2
    tail -n 20 "$folder/server.log" >&2
    exit 1
  }
  sleep 0.1
done
[[ -s $folder/ready.json ]] || {
  say "the server does not serve after 60 s" >&2
  tail -n 20 "$folder/server.log" >&2
  exit 1
}
address=$(python -c 'import json, sys; print(json.load(open(sys.argv[1]))["address"])' \
  "$folder/ready.json")

say "stream from $address: \"$prompt\""
python "$root/examples/stream.py" "$address" "$prompt" --max-tokens 64
if [[ -z ${CHECKPOINT:-} ]]; then
  say "The tiny checkpoint has random weights: the text is gibberish, and that is right."
fi

say "stop the server"
kill -TERM "$server"
trap - EXIT
wait "$server" || {
  status=$?
  say "the server ended with status $status" >&2
  tail -n 20 "$folder/server.log" >&2
  exit 1
}
say "done"
