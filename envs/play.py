"""Play an environment by hand, seeing what an agent sees."""

from collections.abc import Callable
from contextlib import closing

from asyncrl.env import Env, EnvSpec
from asyncrl.types import Observation, Step, Task

SHOWN_ACTIONS = 20


def play(
    spec: EnvSpec,
    task_id: str | None = None,
    *,
    seed: int = 0,
    read: Callable[[str], str] = input,
    write: Callable[[str], object] = print,
) -> Step | None:
    """One episode with a person as the policy; the end of the input leaves it.

    Args:
        task_id: None plays the first training task.
        read: asks for the next action, given the prompt to show.

    Returns the last step, or None where none was taken.

    Raises ValueError: the environment has no such task or cannot be made.
    """
    with closing(spec.make()) as env:
        task = Task(spec.name, env.tasks("train")[0] if task_id is None else task_id, seed)
        seen = env.reset(task)
        write(env.role)
        write(f"Task {task.id}: {seen.goal}")
        turn, last = 0, None
        while last is None or not last.done:
            turn += 1
            write(f"\n{seen.text}")
            write(_actions(env, seen))
            try:
                action = read(f"{turn}/{env.max_turns}> ")
            except (EOFError, KeyboardInterrupt):
                write("\nLeft before the end.")
                return last
            last = env.step(action)
            seen = last.observation
        write(f"\n{seen.text}")
        how = "truncated: out of turns" if last.truncated else "terminated"
        write(f"{'Success' if last.info.get('success') else 'No success'} after {turn} turns ({how}).")
        return last


def _actions(env: Env, seen: Observation) -> str:
    actions = seen.actions if seen.actions is not None else env.list_actions()
    if actions is None:
        return seen.action_guide or "This environment does not list its actions."
    more = len(actions) - SHOWN_ACTIONS
    listed = "\n".join(f"  {action}" for action in actions[:SHOWN_ACTIONS])
    return f"Actions:\n{listed}" + (f"\n  ... and {more} more" if more > 0 else "")
