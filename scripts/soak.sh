#!/usr/bin/env bash
# Runs `tidemark dev` for a while, kills it at random moments, checks that it recovers each time, and that the
# backbone's tables stay flat: as many bytes per event at the end as in the beginning, hardly a dead row in what is
# only appended to, and no growth at all of the few rows that move with every batch.
#   scripts/soak.sh BINARY MINUTES
set -euo pipefail
. "$(dirname "$0")/lib.sh"
bin=$(readlink -f "$1") minutes=$2
dir=$(mktemp -d); log=$dir/soak.log; samples=$dir/samples
chmod 755 "$dir"
child=
end() {
    [ -z "$child" ] || kill -INT "$child" 2>/dev/null || true
    wait 2>/dev/null || true
    rm -rf "$dir"
}
trap end EXIT
psql=psql
have psql || psql=$(postgres_bin)/psql

# seconds | events | bytes of the log | its dead rows | bytes of the moving tables | their dead rows
sample() {
    "$psql" -X -q -A -t -F ' ' "$(cat "$dir/data/url")" -c "
        select $SECONDS,
               (select coalesce(sum(next_pseq - 1), 0) from system.bus_partitions),
               sum(pg_total_relation_size(relid)) filter (where relname ~ '^(outbox_events|bus_log|inbox)'),
               coalesce(sum(n_dead_tup) filter (where relname ~ '^(outbox_events|bus_log|inbox)'), 0),
               sum(pg_total_relation_size(relid)) filter (where relname in
                   ('consumer_positions', 'relay_cursor', 'bus_partitions', 'consumer_members')),
               coalesce(sum(n_dead_tup) filter (where relname in
                   ('consumer_positions', 'relay_cursor', 'bus_partitions', 'consumer_members')), 0)
          from pg_stat_user_tables where schemaname = 'system'" >>"$samples"
    tail -n 1 "$samples" | awk '{ printf "    %4d s  %8d events  log %6.1f MiB, %d dead  moving %5d KiB, %d dead\n",
                                  $1, $2, $3 / 1048576, $4, $5 / 1024, $6 }'
}

deadline=$((SECONDS + minutes * 60)) kills=0
while [ $SECONDS -lt $deadline ]; do
    TIDEMARK__TELEMETRY__LISTEN=off "$bin" dev --data-dir "$dir/data" --listen 127.0.0.1:0 >>"$log" 2>&1 &
    child=$!
    sleep $((15 + RANDOM % 45))
    kill -0 "$child" 2>/dev/null || { tail -n 50 "$log" >&2; fail "it ended by itself after $kills kills"; }
    "$bin" status --data-dir "$dir/data" >"$dir/status" || { cat "$dir/status"; fail "status fails after $kills kills"; }
    sample || fail "the database does not answer after $kills kills"
    kill -9 "$child"; wait "$child" 2>/dev/null || true
    child=
    kills=$((kills + 1)); say "killed $kills times, $(((deadline - SECONDS) / 60)) minutes left"
done
awk -v kills="$kills" '
    $2 > 0 { n++; events[n] = $2; log_bytes[n] = $3; log_dead[n] = $4; moving[n] = $5; moving_dead[n] = $6 }
    END {
        if (n < 3) { print "verdict: too short to say anything (" n " samples)"; exit 1 }
        # The first samples hold empty pages and fresh indexes: growth per event is counted from there on.
        first = int((n + 2) / 3)
        grown = events[n] - events[first]
        if (events[n] <= events[1] || grown <= 0) { print "verdict: no event came after the first sample"; exit 1 }
        middle = int((first + n) / 2)
        early = (log_bytes[middle] - log_bytes[first]) / (events[middle] - events[first] + 1)
        late = (log_bytes[n] - log_bytes[middle]) / (events[n] - events[middle] + 1)
        for (i = 1; i <= n; i++) {
            if (log_dead[i] > dead_max) dead_max = log_dead[i]
            if (moving[i] > moving_max && i > first) moving_max = moving[i]
            if (moving_dead[i] > moving_dead_max) moving_dead_max = moving_dead[i]
        }
        printf "%d kills, %d events; log: %.0f bytes per event early, %.0f late, at most %d dead rows; ", \
            kills, events[n], early, late, dead_max
        printf "moving rows: %d KiB early, at most %d KiB later, at most %d dead rows\n", \
            moving[first] / 1024, moving_max / 1024, moving_dead_max
        if (late > 1.5 * early + 200) { print "verdict: the log grows faster than its events"; exit 1 }
        if (dead_max > 1000 + events[n] / 100) { print "verdict: dead rows pile up in the log"; exit 1 }
        if (moving_max > 2 * moving[first] + 512 * 1024) { print "verdict: the moving rows spread"; exit 1 }
        if (moving_dead_max > 20000) { print "verdict: dead rows pile up in the moving tables"; exit 1 }
        print "verdict: flat"
    }' "$samples" || fail "the tables do not stay flat; samples (seconds, events, bytes, dead, bytes, dead): $(cat "$samples")"
say "survived $kills kills"
