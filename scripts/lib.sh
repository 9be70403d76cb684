# Shared by the scripts: what is there, what is missing, how to get it. Sourced, not run.

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
tools=${TIDEMARK_TOOLS:-$root/.tools}

say() { printf '\033[1m==>\033[0m %s\n' "$*"; }
fail() { printf 'error: %s\n' "$*" >&2; exit 1; }
have() { command -v "$1" >/dev/null 2>&1; }

# A Debian-like system is one where apt-get can install for us.
is_debian() { have apt-get && have dpkg; }

as_root() {
    if [ "$(id -u)" = 0 ]; then "$@"
    elif have sudo; then sudo "$@"
    else fail "this needs root, and there is no sudo: run as root: $*"
    fi
}

apt_updated=
apt_install() {
    say "installing with apt-get: $*"
    if [ -z "$apt_updated" ]; then
        as_root apt-get update -qq || say "apt-get update failed; trying with the lists that are there"
        apt_updated=1
    fi
    as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$@" >/dev/null
}

# Folders that may hold server binaries, newest first. The binary itself looks in more places.
postgres_bin() {
    local dir
    for dir in "${TIDEMARK_PG_BIN:-}" $(ls -d /usr/lib/postgresql/*/bin 2>/dev/null | sort -t/ -k5 -rn) \
        "$(have pg_config && pg_config --bindir 2>/dev/null)" /usr/local/pgsql/bin \
        /opt/homebrew/opt/postgresql@*/bin /usr/local/opt/postgresql@*/bin; do
        if [ -n "$dir" ] && [ -x "$dir/initdb" ] && [ -x "$dir/postgres" ]; then echo "$dir"; return 0; fi
    done
    dir=$(command -v initdb 2>/dev/null) && dirname "$(readlink -f "$dir")"
}

need_postgres() {
    if [ -n "$(postgres_bin)" ]; then say "Postgres server binaries: $(postgres_bin)"; return; fi
    if is_debian; then
        # The package would create and start a cluster of its own; ours is private.
        as_root mkdir -p /etc/postgresql-common
        [ -e /etc/postgresql-common/createcluster.conf ] ||
            echo 'create_main_cluster = false' | as_root tee /etc/postgresql-common/createcluster.conf >/dev/null
        apt_install postgresql postgresql-contrib
        [ -n "$(postgres_bin)" ] || fail "the postgresql package brought no server binaries"
    else
        missing+=("Postgres 15 or newer, with initdb and pg_ctl (macOS: brew install postgresql@17; Fedora: dnf install postgresql-server); or set TIDEMARK_PG_BIN")
    fi
}

# need_apt PROGRAM PACKAGE HINT
need_apt() {
    if have "$1"; then return; fi
    if is_debian; then apt_install "$2"; else missing+=("$1 ($3)"); fi
}

# Says everything that is missing at once.
missing=()
report_missing() {
    [ ${#missing[@]} = 0 ] && return
    printf '\nThis system is not Debian-like, so these must be installed by hand:\n' >&2
    printf '  - %s\n' "${missing[@]}" >&2
    exit 1
}
