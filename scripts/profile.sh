#!/usr/bin/env bash
# Where a command of ours spends its CPU time, as a flame graph.
#   scripts/profile.sh                                       a history sync of 200 000 simulated logs (LOGS=N)
#   scripts/profile.sh sync --config tidemark.toml           any other command
# Leaves target/profile/{flamegraph.svg,folded.txt,report.txt}.
set -euo pipefail
. "$(dirname "$0")/lib.sh"
cd "$root"

if ! have perf; then
    if is_debian; then apt_install linux-perf; else fail "perf is not installed: get it from your distribution (Debian: apt-get install linux-perf)"; fi
fi
target=${CARGO_TARGET_DIR:-target}
out=$target/profile
mkdir -p "$out"
# Some machines have no counters to sample by; the clock is always there.
perf record -q -e cpu-clock -F 99 -o "$out/perf.data" true >/dev/null 2>&1 ||
    fail "perf may not sample here: as root, sysctl kernel.perf_event_paranoid=1; in a container, add CAP_PERFMON"

# The binary that is measured carries line tables.
say "building $target/measured/tidemark"
cargo build --locked --profile measured -p tidemark
bin=$target/measured/tidemark

work=
node=
clean() {
    if [ -n "$node" ]; then kill "$node" 2>/dev/null || true; fi
    if [ -n "$work" ]; then rm -rf "$work"; fi
}
trap clean EXIT

if [ $# -eq 0 ]; then
    logs=${LOGS:-200000}
    work=$(mktemp -d)
    chmod 755 "$work"
    "$bin" sim --listen 127.0.0.1:0 --bench-logs "$logs" --blocks $((logs / 20)) >"$work/url" 2>/dev/null &
    node=$!
    for _ in $(seq 600); do [ -s "$work/url" ] && break; sleep 0.1; done
    [ -s "$work/url" ] || fail "the simulated node did not start"
    cat >"$work/tidemark.toml" <<TOML
[[network]]
id = 31337
slug = "profile"
rpc = ["$(cat "$work/url")"]
finality = { depth = 1 }
TOML
    set -- sync --config "$work/tidemark.toml" --data-dir "$work/data" --until $((logs / 20 - 2))
fi

say "recording: tidemark $*"
perf record -q -e cpu-clock -F 199 --call-graph dwarf,16384 -o "$out/perf.data" "$bin" "$@"
say "reading the stacks"
perf script -i "$out/perf.data" --comm tidemark,tokio-runtime-w,tokio-rt-worker >"$out/stacks.txt" 2>/dev/null ||
    perf script -i "$out/perf.data" >"$out/stacks.txt" 2>/dev/null
perf report -i "$out/perf.data" --stdio --no-children --percent-limit 1 -g none 2>/dev/null >"$out/report.txt" || true

# One line per stack, outermost frame first, with how often it was seen.
awk '
    /^[^ \t]/ { next }
    /^[ \t]+[0-9a-f]+ / {
        name = $0; sub(/^[ \t]+[0-9a-f]+ /, "", name); sub(/ \([^()]*\)$/, "", name); sub(/\+0x[0-9a-f]+$/, "", name)
        gsub(/;/, ":", name); stack = stack == "" ? name : name ";" stack; next
    }
    /^$/ { if (stack != "") { seen[stack]++; stack = "" } }
    END { if (stack != "") seen[stack]++; for (stack in seen) print stack, seen[stack] }
' "$out/stacks.txt" | sort >"$out/folded.txt"
rm -f "$out/stacks.txt"
[ -s "$out/folded.txt" ] || fail "no samples were taken; see $out/perf.data"

inferno=$(command -v inferno-flamegraph || echo "$tools/bin/inferno-flamegraph")
if [ ! -x "$inferno" ]; then
    say "installing inferno into $tools (draws the flame graph)"
    cargo install --quiet --locked --root "$tools" --no-default-features --features cli inferno || true
fi
if [ -x "$inferno" ]; then
    "$inferno" --title "tidemark $1" "$out/folded.txt" >"$out/flamegraph.svg"
    say "wrote $out/flamegraph.svg"
else
    say "inferno could not be installed: no picture; any flame graph viewer reads $out/folded.txt"
fi
say "wrote $out/folded.txt and $out/report.txt"
