#!/usr/bin/env bash
# The Debian packages that the tests need beside Python: one list, for `make test` and for CI. Installs what is missing
# where that is allowed, and else names it: tests then skip what it is for, and say so.
set -euo pipefail
PATH=$PATH:/usr/sbin:/sbin

missing=()
need() { # PACKAGE, what it is for, and a command that fails where it is missing
    if ! "${@:3}" >/dev/null 2>&1; then
        missing+=("$1")
        echo "missing: Debian's $1, $2"
    fi
}
mooncake_can_load() { ldconfig -p | grep -q libibverbs.so.1; }

need chromium "which plays the video that a test makes" command -v chromium
need iproute2 "which makes the second host of some tests" command -v ip
need libibverbs1 "which Mooncake loads" mooncake_can_load
need nginx-light "which stands before a server as people have it" command -v nginx
need openssl "which makes its certificate" command -v openssl
need redis-server "which several servers share" command -v redis-server

((${#missing[@]})) || exit 0
root=()
if [ "$(id -u)" != 0 ]; then root=(sudo -n); fi
if ! command -v apt-get >/dev/null || ! "${root[@]}" true 2>/dev/null; then
    echo "this user may not install packages: what needs these is skipped"
    exit 0
fi
"${root[@]}" apt-get update -qq
"${root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
