#!/usr/bin/env bash
# The longest files and functions per crate. Look at the tail, not at the average.
set -euo pipefail
. "$(dirname "$0")/lib.sh"
cd "$root"
for crate in crates/*/; do
    printf '\n%s\n' "$crate"
    find "$crate" -name '*.rs' -print0 | xargs -0 wc -l | grep -v ' total$' | sort -rn | head -n 3 |
        awk '{ printf "  %5d lines  %s\n", $1, $2 }'
    find "$crate" -name '*.rs' -print0 | xargs -0 awk '
        /^[[:space:]]*(pub(\([a-z]+\))? )?(const )?(async )?fn / {
            match($0, /^[[:space:]]*/); indent = RLENGTH; start = FNR; name = $0; open = 1 }
        open && /^[[:space:]]*}/ {
            match($0, /^[[:space:]]*/)
            if (RLENGTH == indent) {
                sub(/^[[:space:]]*/, "", name); sub(/\(.*/, "", name)
                printf "%5d lines  %s:%d %s\n", FNR - start + 1, FILENAME, start, name
                open = 0 } }' | sort -rn | head -n 3 | sed 's/^/    fn /'
done
