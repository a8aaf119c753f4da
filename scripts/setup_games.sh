#!/usr/bin/env bash
# Add to .venv what comes as source and is compiled for minutes: TextWorld, and ALFWorld's original engine.
#
# A second call with nothing changed returns at once.
set -euo pipefail
cd "$(dirname "$0")/.."

lock=requirements-games.lock
stamp=.venv/.asyncrl-games
state=$(cksum <"$lock")
if [[ -f $stamp && $(<"$stamp") == "$state" ]]; then
    exit 0
fi

fail() {
    printf 'setup-games: %s\n' "$@" >&2
    exit 1
}

for tool in gcc g++ make; do
    command -v "$tool" >/dev/null || fail "$tool was not found; C and C++ are compiled." \
        "Install it (Debian, Ubuntu: apt install build-essential), or go without these games: make lint unit simulation integration e2e"
done
# The builds look for cmake on the PATH, and without isolation setuptools and cmake are those of .venv.
export PATH="$PWD/.venv/bin:$PATH" MAKEFLAGS=
install() { .venv/bin/python -m pip --disable-pip-version-check --no-input install --quiet --no-deps --no-compile "$@"; }

echo "setup-games: compiling $lock; this takes minutes"
rm -f "$stamp"
command -v cmake >/dev/null || install cmake
install --no-build-isolation --requirement "$lock"
echo "$state" >"$stamp"
echo "setup-games: done in $SECONDS s"
