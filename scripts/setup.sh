#!/usr/bin/env bash
# Make .venv from the lock file. Usage: scripts/setup.sh [cpu|gpu]
#
# A second call with nothing changed returns at once. PYTHON names the interpreter to use, TORCH_INDEX another index for
# CPU builds of PyTorch.
set -euo pipefail
cd "$(dirname "$0")/.."

extra=${1:-cpu}
lock=requirements-$extra.lock
torch_index=${TORCH_INDEX:-https://download.pytorch.org/whl/cpu}

source scripts/pip.sh

[[ -f $lock ]] || fail "there is no $lock; the extra is cpu or gpu, got '$extra'"

stamp=.venv/.asyncrl-setup
state="$extra $(cat "$lock" pyproject.toml | cksum)"
if [[ -x .venv/bin/asyncrl && -f $stamp && $(<"$stamp") == "$state" ]]; then
    exit 0
fi

usable() { # An interpreter of the right version that runs (a pyenv shim may not) and can make environments.
    "$1" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))' >/dev/null 2>&1
}

python=
for candidate in ${PYTHON:-python3.11 python3.12 python3 /usr/bin/python3.11 /usr/bin/python3.12 \
    "${HOME:-/root}"/.pyenv/versions/3.11.*/bin/python "${HOME:-/root}"/.pyenv/versions/3.12.*/bin/python}; do
    if usable "$candidate"; then
        python=$candidate
        break
    fi
done
[[ -n $python ]] || fail "no working Python 3.11 or 3.12 with the venv module was found${PYTHON:+ (PYTHON=$PYTHON)}." \
    "Install one (Debian, Ubuntu: apt install python3.11 python3.11-venv python3.11-dev), or name it: make setup PYTHON=/path/to/python3.11"

include=$("$python" -c 'import sysconfig; print(sysconfig.get_path("include"))')
[[ -f $include/Python.h ]] || fail "$python has no headers ($include/Python.h is missing); they are compiled against." \
    "Install them (Debian, Ubuntu: apt install python3.11-dev), or name another interpreter with PYTHON=..."

compiler=
for candidate in ${CXX:-g++ c++ clang++}; do
    if command -v "$candidate" >/dev/null; then
        compiler=$candidate
        break
    fi
done
[[ -n $compiler ]] || fail "no C++ compiler was found (g++, c++ or clang++); DeepSpeed compiles an operator at its first start." \
    "Install one (Debian, Ubuntu: apt install g++)."

echo "setup: $("$python" --version) ($python), $compiler, $lock"
rm -f "$stamp"
"$python" -m venv .venv

if [[ $extra == cpu ]]; then
    torch=$(grep '^torch==' "$lock")
    # Found by name where pip's configuration offers CPU builds; elsewhere PyTorch's own index has them.
    install "$torch" 2>/dev/null ||
        install --index-url "$torch_index" "$torch" ||
        fail "$torch is offered neither by pip's configuration nor by $torch_index." \
            "Make that file reachable (pip config set global.find-links FOLDER, or TORCH_INDEX=URL), then run this again."
fi
# Without dependencies: the list is complete, and resolving would pull in a torchvision that breaks a CPU torch.
install --requirement "$lock"
install --no-build-isolation --editable .
if [[ $extra == cpu ]]; then
    # What every run imports is byte-compiled here and not in five of a first run's processes at once.
    .venv/bin/python -W ignore -c "
import asyncrl.engine.transfer, asyncrl.learner.rank, asyncrl.ops.quickstart
import vllm.v1.engine.core, vllm.v1.worker.gpu_model_runner" >/dev/null
fi
echo "$state" >"$stamp"
echo "setup: done in $SECONDS s; next: make quickstart, or .venv/bin/asyncrl --help"
