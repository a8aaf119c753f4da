# shellcheck shell=bash
# Sourced by the scripts that set up .venv, from the project's folder.

fail() { # A line an argument.
    printf 'setup: %s\n' "$@" >&2
    exit 1
}

# Lock files are complete, so nothing is resolved. Byte-compiling all of it takes longer than installing it, and most of
# it is never imported: Python does it on first use.
install() { .venv/bin/python -m pip --disable-pip-version-check --no-input install --quiet --no-deps --no-compile "$@"; }
