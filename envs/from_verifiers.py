"""Text environments of the package ``verifiers`` (before 0.4) as asyncrl environments.

Invariants:

* The package's own rollout runs: its turns, stop conditions, clean-up and rubric are not imitated here. What it takes
  for a language model is :class:`_Policy`, which hands its prompt out and waits for the agent's action.
* A task is a row of the data set, ``train/17`` or ``test/3``; ``Task.seed`` changes nothing.
* All its coroutines run on one loop in a thread of this process; every wait for them is bounded by ``timeout_s``.
* An error of the environment or its rubric is raised, never scored.
* A suspended rollout cannot be copied, so branches are replayed and verified.
"""

import asyncio
import threading
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import Future
from functools import cache
from typing import Any, ClassVar
from unittest.mock import patch

from asyncrl.env import Env
from asyncrl.types import Observation, Step, Task

try:
    import verifiers.envs.environment as upstream
    from verifiers.clients import Client
    from verifiers.envs.multiturn_env import MultiTurnEnv
    from verifiers.types import Response, ResponseMessage
except ImportError as error:
    raise ImportError(f"{error}; it needs verifiers before 0.4: pip install 'verifiers<0.4'") from error

TURNS = 20
"""The limit of an environment that has none of its own."""
BEGIN = "Begin."
OVER = "The episode is over."
SILENCE = "Nothing was said."


class VerifiersText(Env):
    """One rollout of a ``verifiers.MultiTurnEnv`` (or ``SingleTurnEnv``) without tools. A subclass says which:

        class Wordle(VerifiersText):
            reply = "<guess>{action}</guess>"

            @classmethod
            def load(cls):
                return verifiers.load_environment("wordle")

    The goal is the row's prompt, an observation what the environment said since the last action. The reward, the
    rubric's, comes with the last step; success is a reward of at least ``success_at``. ``test`` is the evaluation set;
    where there is none, the last tenth of the rows is kept back for it.
    """

    role: ClassVar[str] = "You act in a text environment: read what it says and answer."
    max_turns: ClassVar[int] = TURNS
    reply: ClassVar[str] = "{action}"
    """The assistant's message that an action stands for: where its parser wants tags, they belong here."""
    success_at: ClassVar[float] = 1.0
    timeout_s: ClassVar[float] = 60.0

    @classmethod
    def load(cls) -> Any:
        """The environment, made once a process."""
        raise NotImplementedError(f"{cls.__name__}: write load(), which returns a verifiers.MultiTurnEnv")

    @classmethod
    def tasks(cls, split: str) -> Sequence[str]:
        return list(_rows(cls, split))

    def __init__(self) -> None:
        """Raises ValueError: what ``load`` gives has tools, or is no such environment."""
        self._made = _loaded(type(self))
        self.max_turns = self._made.max_turns  # type: ignore[misc]  # the class's is a default
        self._policy = _Policy()
        self._run: Future[Any] | None = None
        self._goal, self._text, self._over = "", "", True

    def reset(self, task: Task) -> Observation:
        self.close()
        rows = _rows(type(self), task.id.partition("/")[0])
        if task.id not in rows:
            raise ValueError(f"{type(self).__name__}: no task {task.id!r}; train/0 is the first")
        source, index = rows[task.id]
        self._policy, self._over = _Policy(), False
        self._run = asyncio.run_coroutine_threadsafe(
            self._made.run_rollout(dict(source[index]), self._policy, "asyncrl", {}), _loop()
        )
        prompt = self._wait(self._run, self._policy.prompts.get())
        if prompt is None:
            self._outcome(self._run)
            raise RuntimeError(f"{type(self).__name__}: task {task.id} ended before its first turn")
        self._goal = "\n\n".join(filter(None, map(_content, prompt)))
        self._text = BEGIN
        return self._observe()

    def step(self, action: str) -> Step:
        if self._over or self._run is None:
            raise RuntimeError(f"{type(self).__name__}: the episode is over; call reset first")
        action = action.encode("utf-8", "replace").decode()  # a message takes no half of a surrogate pair
        prompt = self._wait(self._run, self._answer(self.reply.replace("{action}", action)))
        if prompt is not None:
            self._text = _news(prompt) or SILENCE
            return Step(self._observe(), 0.0, False, False, {})
        self._over, output = True, self._outcome(self._run)
        self._text = _news(output.get("completion") or []) or OVER
        reward, truncated = float(output["reward"] or 0.0), output.get("stop_condition") == "max_turns_reached"
        return Step(self._observe(), reward, not truncated, truncated, {"success": reward >= self.success_at})

    def close(self) -> None:
        if self._run is not None:
            self._run.cancel()
        self._run, self._over = None, True

    def _outcome(self, run: Future[Any]) -> Any:
        """What a finished rollout came to. Raises RuntimeError: the environment failed, so it came to nothing."""
        output = run.result()
        if output.get("error") is not None or output.get("stop_condition") == "timeout_reached":
            raise RuntimeError(
                f"{type(self).__name__}: the environment failed: {output.get('error') or output['stop_condition']}"
            )
        return output

    async def _answer(self, message: str) -> Any:
        self._policy.answers.put_nowait(message)
        return await self._policy.prompts.get()

    def _wait(self, rollout: Future[Any], asked: Coroutine[Any, Any, Any]) -> Any:
        """The next prompt, or None where the rollout ended. Raises what it raised; TimeoutError."""

        async def either() -> Any:
            prompt: asyncio.Future[Any] = asyncio.ensure_future(asked)
            run = asyncio.wrap_future(rollout)
            done, _ = await asyncio.wait({prompt, run}, timeout=self.timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if prompt in done:
                return prompt.result()
            prompt.cancel()
            if run in done:
                run.result()
                return None
            raise TimeoutError(f"{type(self).__name__}: nothing came within timeout_s = {self.timeout_s}")

        return asyncio.run_coroutine_threadsafe(either(), _loop()).result(self.timeout_s + 5)

    def _observe(self) -> Observation:
        return Observation(self._text, self._goal, action_guide="any text")


class _Policy(Client):
    """What a rollout takes for a language model."""

    def __init__(self) -> None:
        super().__init__(None)
        self.prompts: asyncio.Queue[Any] = asyncio.Queue()
        self.answers: asyncio.Queue[str] = asyncio.Queue()

    async def get_native_response(self, prompt: Any, *_: Any, **__: Any) -> str:
        self.prompts.put_nowait(prompt)
        return await self.answers.get()

    async def from_native_response(self, response: str) -> Any:
        message = ResponseMessage(content=response, finish_reason="stop", is_truncated=False)
        return Response(id="asyncrl", created=0, model="asyncrl", message=message)

    async def to_native_prompt(self, messages: Any) -> tuple[Any, dict[str, Any]]:
        return messages, {}

    async def to_native_tool(self, tool: Any) -> Any:
        return tool

    async def raise_from_native_response(self, response: str) -> None:
        """No answer is wrong."""

    def setup_client(self, config: Any) -> None:
        """There is nothing to connect to."""

    async def close(self) -> None:
        """Nothing is held."""


@cache
def _loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="verifiers", daemon=True).start()
    return loop


@cache
def _loaded(owner: type[VerifiersText]) -> Any:
    # Making one takes over SIGINT and SIGTERM, which are the process's own here, and fails outside the main thread.
    with patch.object(upstream, "signal"):
        made = owner.load()
    if not isinstance(made, MultiTurnEnv):
        raise ValueError(f"{owner.__name__}: load() gave {type(made).__name__}, not a verifiers.MultiTurnEnv")
    if made.tool_defs:
        raise ValueError(f"{owner.__name__}: it calls tools, which no action in words can; take one without")
    if made.max_turns <= 0:
        made.max_turns = TURNS
    return made


@cache
def _rows(owner: type[VerifiersText], split: str) -> Mapping[str, tuple[Any, int]]:
    """Task id -> the data set and the place of its row. Raises ValueError: unknown split."""
    if split not in ("train", "test"):
        raise ValueError(f"{owner.__name__}: no split {split!r}; known: train, test")
    made = _loaded(owner)
    train, held_out = made.get_dataset(), made.build_eval_dataset()
    if held_out is not None:
        source = train if split == "train" else held_out
        return {f"{split}/{i}": (source, i) for i in range(len(source))}
    border = len(train) - max(1, len(train) // 10)
    return {f"{split}/{i}": (train, i) for i in (range(border) if split == "train" else range(border, len(train)))}


def _news(messages: Sequence[Any]) -> str:
    """What was said after the last answer."""
    last = max((i for i, one in enumerate(messages) if _of(one, "role") == "assistant"), default=-1)
    return "\n\n".join(filter(None, map(_content, messages[last + 1 :])))


def _content(message: Any) -> str:
    content = _of(message, "content")
    return (
        content if isinstance(content, str) else " ".join(filter(None, (_of(part, "text") for part in content or ())))
    )


def _of(value: Any, name: str) -> Any:
    return value.get(name) if isinstance(value, Mapping) else getattr(value, name, None)
