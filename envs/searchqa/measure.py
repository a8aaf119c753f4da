"""The measurements of Search QA behind the docs' numbers. Invariant: all but times is a function of data and seed.

python -m envs.searchqa.measure retrieval [--retriever WHERE]   answers among the first passages, queries a second
python -m envs.searchqa.measure episodes [--split small_test]   a random and a knowing agent; steps, branches, memory
"""

import argparse
import json
import random
import resource
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from asyncrl.types import Task
from envs.data_home import data_folder
from envs.searchqa.client import Service, find_retriever, shared
from envs.searchqa.env import SearchQA
from envs.searchqa.questions import PARTS, find_file, load
from envs.searchqa.score import holds_answer

SETS = ("small/nq", "small/triviaqa", "small/popqa", "small/2wikimultihopqa", "small/hotpotqa", "bamboogle/test")
LONGEST_ANSWER = 5
"""Words of a random agent's answers."""


def retrieval(where: str | None, topk: int, clients: int) -> None:
    """The question itself as the query; an answer counts where it stands in a passage in whole words."""
    folder = data_folder("searchqa")
    began = time.perf_counter()
    retriever = shared(Service(find_retriever(folder, where)))
    retriever.ask("first of all", topk)
    _say(f"opened in {time.perf_counter() - began:.2f} s, {_memory_mb():.0f} MB")
    for name in SETS:
        questions = load(find_file(folder, name), PARTS[name].rows)
        began = time.perf_counter()
        with ThreadPoolExecutor(clients) as pool:
            hits = list(pool.map(lambda question: retriever.ask(question.text, topk), questions))
        spent = time.perf_counter() - began
        found = sum(
            any(holds_answer(hit.passage.contents, question.golden) for hit in found)
            for question, found in zip(questions, hits, strict=True)
        )
        _say(f"{name:24} {found / len(questions):6.1%} of {len(questions):5}  {len(questions) / spent:6.0f} queries/s")


def episodes(split: str, tasks: int, seed: int, env: SearchQA) -> None:
    """A random agent: searches for some of the question's words, then answers some words of what it saw."""
    rng = random.Random(seed)
    ids = list(env.tasks(split))
    chosen = [Task("searchqa", one, seed) for one in rng.sample(ids, min(tasks, len(ids)))]
    began = time.perf_counter()
    env.reset(chosen[0])
    env.step("<search>first of all</search>")
    _say(f"first reset and search (questions and index are read): {time.perf_counter() - began:.2f} s")
    solved = {"random": 0, "knowing": 0}
    steps, spent, resets, branches = 0, 0.0, 0.0, 0.0
    for task in chosen:
        began = time.perf_counter()
        seen = env.reset(task)
        resets += time.perf_counter() - began
        done = False
        while not done:
            move = random_move(rng, seen.goal, seen.text, last=rng.random() < 0.4)
            began = time.perf_counter()
            step = env.step(move)
            spent, steps = spent + time.perf_counter() - began, steps + 1
            seen, done = step.observation, step.done
        solved["random"] += bool(step.info["success"])
        moves = env.expert(task)
        env.step(moves[0])
        began = time.perf_counter()
        env.restore(env.snapshot())
        branches += time.perf_counter() - began
        solved["knowing"] += bool(env.step(moves[-1]).info["success"])
    count = len(chosen)
    for name, right in solved.items():
        _say(f"{name} agent: {right / count:.1%} of {count}")
    _say(f"{steps / spent:.0f} steps/s, reset {1e3 * resets / count:.3f} ms, branch {1e3 * branches / count:.3f} ms")
    _say(f"memory {_memory_mb():.0f} MB")


def random_move(rng: random.Random, question: str, text: str, last: bool) -> str:
    """Some of the question's words as a query; with ``last``, some words of what was seen as the answer."""
    seen = json.loads(text)["result"] if text.startswith("{") else ""
    if not last or not seen:
        return f"<search>{_some(rng, question.split(), 8)}</search>"
    return f"<answer>{_some(rng, seen.split(), LONGEST_ANSWER)}</answer>"


def _some(rng: random.Random, words: Sequence[str], most: int) -> str:
    """Up to ``most`` words in a row."""
    length = rng.randint(1, min(most, len(words)))
    start = rng.randrange(len(words) - length + 1)
    return " ".join(words[start : start + length])


def _memory_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m envs.searchqa.measure")
    parser.add_argument("what", choices=("retrieval", "episodes"))
    parser.add_argument("--retriever", help="address of a service, index folder or corpus file")
    parser.add_argument("--topk", type=int, default=3)
    parser.add_argument("--clients", type=int, default=1, help="threads that ask at once")
    parser.add_argument("--data", help="folder of questions, or 'sample'")
    parser.add_argument("--split", default="small_test")
    parser.add_argument("--tasks", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    try:
        if given.what == "retrieval":
            retrieval(given.retriever, given.topk, given.clients)
        else:
            env = SearchQA(given.data, given.retriever, given.topk)
            episodes(given.split, given.tasks, given.seed, env)
    except ValueError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
