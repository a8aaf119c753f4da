#!/usr/bin/env bash
# Add to .venv what comes as source and is compiled for minutes: TextWorld, and ALFWorld's original engine.
#
# A second call with nothing changed returns at once.
set -euo pipefail
cd "$(dirname "$0")/.."

lock=requirements-games.lock
stamp=.venv/.asyncrl-games
state="$(.venv/bin/python --version) $(cksum <"$lock")"
if [[ -f $stamp && $(<"$stamp") == "$state" ]]; then
    exit 0
fi

source scripts/pip.sh

for tool in gcc g++ make; do
    command -v "$tool" >/dev/null || fail "$tool was not found; C and C++ are compiled." \
        "Install it (Debian, Ubuntu: apt install build-essential), or go without these games: make lint unit simulation integration e2e"
done
# The builds find cmake on the PATH, and without isolation setuptools and cmake are those of .venv. They run make
# themselves, which must not take this one's flags.
export PATH="$PWD/.venv/bin:$PATH" MAKEFLAGS=

echo "setup: compiling $lock; this takes minutes"
rm -f "$stamp"
command -v cmake >/dev/null || install cmake
install --no-build-isolation --requirement "$lock"
echo "$state" >"$stamp"
echo "setup: done in $SECONDS s"
