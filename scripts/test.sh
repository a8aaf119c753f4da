#!/usr/bin/env bash
# Run the named groups of checks, stopping at the first that fails: lint, unit, simulation, integration, e2e.
# In order, except that two of them, named among others, run beside those: lint beside the first, the simulation beside
# all of them, in the time that they leave idle.
set -euo pipefail
cd "$(dirname "$0")/.."

# No check may reach for a network, an account or the user's own cluster.
export HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 RAY_USAGE_STATS_ENABLED=0 WANDB_MODE=offline DS_ACCELERATOR=cpu
export TOKENIZERS_PARALLELISM=false
# Ray's workers would otherwise be nearly as patient as the simulation beside them.
export RAY_worker_niceness=0
unset RAY_ADDRESS
export PATH="$PWD/.venv/bin:$PATH"

outputs=$(mktemp -d)
declare -A beside=() # process group of each group of checks that runs beside the others

end() {
    for pid in "${beside[@]}"; do kill -TERM -- "-$pid" 2>/dev/null || true; done
    rm -rf "$outputs"
}
trap end EXIT

# start_beside GROUP NICENESS
start_beside() {
    # A session of its own can be ended as a whole. Where the kernel shares the processor between sessions first
    # (autogroups), niceness counts only within one, so the session is made nice too.
    setsid nice -n "$2" bash -c '
        { echo "$2" >/proc/self/autogroup; } 2>/dev/null || true
        exec scripts/test.sh "$1"
    ' _ "$1" "$2" >"$outputs/$1" 2>&1 &
    beside[$1]=$!
}

# Wait for a group, if it runs beside the others, and tell its output; fails as it did.
finish_beside() {
    if [ -z "${beside[$1]:-}" ]; then return; fi
    local status=0
    wait "${beside[$1]}" || status=$?
    unset "beside[$1]"
    echo "== $1, begun with the first group"
    cat "$outputs/$1"
    return $status
}

# Fail at once when the simulation has failed already.
check_simulation() {
    if [ -n "${beside[simulation]:-}" ] && ! kill -0 "${beside[simulation]}" 2>/dev/null; then finish_beside simulation; fi
}

alone=$(($# == 1))
for group in "$@"; do
    case $alone-$group in
    0-lint) start_beside lint 0 ;;
    0-simulation) start_beside simulation 19 ;;
    esac
done

for group in "$@"; do
    began=$SECONDS
    case $alone-$group in
    0-lint | 0-simulation) continue ;;
    1-lint)
        echo "== lint"
        ruff check .
        ruff format --check .
        mypy
        lint-imports
        ;;
    ?-unit)
        echo "== unit"
        OMP_NUM_THREADS=1 pytest tests/unit -n logical --maxprocesses 4 --dist worksteal
        ;;
    1-simulation | ?-integration | ?-e2e)
        echo "== $group"
        pytest "tests/$group" --durations=12 --durations-min=10
        ;;
    *)
        echo "test.sh: unknown group '$group'; known: lint, unit, simulation, integration, e2e" >&2
        exit 2
        ;;
    esac
    echo "== $group: $((SECONDS - began)) s"
    finish_beside lint
    check_simulation
done
finish_beside lint
finish_beside simulation
