"""A small environment of the package ``verifiers``, and what makes it one of ours."""

from typing import Any

import verifiers as vf
from datasets import Dataset

from envs.from_verifiers import VerifiersText


class Higher(vf.MultiTurnEnv):
    """Find a number below ten; the answer to a wrong one is where to go."""

    async def env_response(self, messages: Any, state: Any, **_: Any) -> Any:
        said, sought = guess(messages), int(state["answer"])
        if said == sought:
            state["final_env_response"] = [{"role": "user", "content": "That is it."}]
            return state["final_env_response"]
        told = "That is no number." if said is None else "Higher." if said < sought else "Lower."
        return [{"role": "user", "content": told}]


def guess(messages: Any) -> int | None:
    text = str(messages[-1]["content"]).removeprefix("<n>").removesuffix("</n>").strip()
    return int(text) if text.isascii() and text.isdigit() and len(text) < 3 else None


def found(completion: Any, answer: str) -> float:
    return float(any(one["role"] == "assistant" and guess([one]) == int(answer) for one in completion))


def rows(first: int, count: int) -> Dataset:
    return Dataset.from_list([{"question": f"Game {i}", "answer": str(i % 10)} for i in range(first, first + count)])


class Guessing(VerifiersText):
    reply = "<n>{action}</n>"
    evaluation: Dataset | None = rows(40, 10)

    @classmethod
    def load(cls) -> vf.MultiTurnEnv:
        system = "I think of a number below ten."
        rubric = vf.Rubric(funcs=[found])
        return Higher(
            dataset=rows(0, 40), eval_dataset=cls.evaluation, system_prompt=system, rubric=rubric, max_turns=5
        )


class WithoutEvaluation(Guessing):
    evaluation = None


class Failing(Guessing):
    @classmethod
    def load(cls) -> vf.MultiTurnEnv:
        class Broken(Higher):
            async def env_response(self, messages: Any, state: Any, **_: Any) -> Any:
                raise vf.Error("the server is gone")

        return Broken(dataset=rows(0, 40), rubric=vf.Rubric(funcs=[found]), max_turns=5)


class Stuck(Guessing):
    timeout_s = 0.2

    @classmethod
    def load(cls) -> vf.MultiTurnEnv:
        class Waiting(Higher):
            async def env_response(self, messages: Any, state: Any, **_: Any) -> Any:
                import asyncio

                await asyncio.sleep(60)

        return Waiting(dataset=rows(0, 40), rubric=vf.Rubric(funcs=[found]), max_turns=5)


class Tools(Guessing):
    @classmethod
    def load(cls) -> vf.MultiTurnEnv:
        def add(a: int, b: int) -> int:
            """Add two numbers."""
            return a + b

        return vf.ToolEnv(tools=[add], dataset=rows(0, 40), rubric=vf.Rubric(funcs=[found]))
