#!/usr/bin/env bash
# psql into the database of `make dev`, or into DB_APP_URL where that is set.
set -euo pipefail
. "$(dirname "$0")/lib.sh"
data=${DATA_DIR:-$root/.tidemark}
if [ -n "${DB_APP_URL:-}" ]; then url=$DB_APP_URL
elif [ -r "$data/url" ]; then url=$(cat "$data/url")
else fail "no database: start 'make dev' first, or set DB_APP_URL"
fi
psql=psql
have psql || psql=$(postgres_bin)/psql
exec "$psql" "$url" "$@"
