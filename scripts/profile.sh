#!/usr/bin/env bash
# Records where a command of ours spends its CPU time.
#   scripts/profile.sh sync --config tidemark.toml --until finalized
set -euo pipefail
. "$(dirname "$0")/lib.sh"
cd "$root"
have perf || fail "perf is not installed (Debian: apt-get install linux-perf)"
[ $# -gt 0 ] || fail "name the command to profile: make profile ARGS='sync --config tidemark.toml --until finalized'"
cargo build --locked --profile fast -p tidemark --config 'profile.fast.debug="line-tables-only"'
target=${CARGO_TARGET_DIR:-target}
mkdir -p "$target/profile"
perf record -F 499 --call-graph dwarf -o "$target/profile/perf.data" "$target/fast/tidemark" "$@"
perf report -i "$target/profile/perf.data" --stdio --no-children --percent-limit 1 >"$target/profile/report.txt"
say "wrote $target/profile/report.txt"
