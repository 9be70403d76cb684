#!/usr/bin/env bash
# Runs `tidemark dev` for a while, kills it at random moments, and checks after every start that it recovers.
#   scripts/soak.sh BINARY MINUTES
set -euo pipefail
. "$(dirname "$0")/lib.sh"
bin=$1 minutes=$2
dir=$(mktemp -d); log=$dir/soak.log
child=
end() { [ -z "$child" ] || kill -INT "$child" 2>/dev/null || true; wait 2>/dev/null || true; rm -rf "$dir"; }
trap end EXIT
deadline=$((SECONDS + minutes * 60)) kills=0
while [ $SECONDS -lt $deadline ]; do
    TIDEMARK__TELEMETRY__LISTEN=off "$bin" dev --data-dir "$dir/data" --listen 127.0.0.1:0 >>"$log" 2>&1 &
    child=$!
    sleep $((10 + RANDOM % 50))
    kill -0 "$child" 2>/dev/null || { tail -n 50 "$log" >&2; fail "it ended by itself after $kills kills"; }
    "$bin" status --data-dir "$dir/data" || fail "status fails after $kills kills"
    kill -9 "$child"; wait "$child" 2>/dev/null || true
    kills=$((kills + 1)); say "killed $kills times, $(((deadline - SECONDS) / 60)) minutes left"
done
child=
say "survived $kills kills"
