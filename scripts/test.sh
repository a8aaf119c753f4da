#!/usr/bin/env bash
# Run the named groups of checks in order, stopping at the first that fails: lint, unit, simulation,
# integration, e2e.
set -euo pipefail
cd "$(dirname "$0")/.."

# No check may reach for a network, an account or the user's own cluster.
export HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 RAY_USAGE_STATS_ENABLED=0 WANDB_MODE=offline DS_ACCELERATOR=cpu
export TOKENIZERS_PARALLELISM=false
unset RAY_ADDRESS
export PATH="$PWD/.venv/bin:$PATH"

for group in "$@"; do
    began=$SECONDS
    echo "== $group"
    case $group in
    lint)
        ruff check .
        ruff format --check .
        mypy
        lint-imports
        ;;
    unit | simulation | integration | e2e)
        pytest "tests/$group"
        ;;
    *)
        echo "test.sh: unknown group '$group'; known: lint, unit, simulation, integration, e2e" >&2
        exit 2
        ;;
    esac
    echo "== $group: $((SECONDS - began)) s"
done
