"""A real vLLM engine on the CPU: what it samples, what it scores, and what a publish does to it."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import ray
import torch
from transformers import AutoModelForCausalLM

from asyncrl.config.engine import EngineConfig
from asyncrl.engine.fleet import Fleet, GenerationFailed
from asyncrl.engine.transfer import CpuTrainer, ModuleSource, ParamMeta, WeightSource, make_trainer
from asyncrl.types import Generation, Sampling, VersionSpan, token_digest

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

TIMEOUT_S = 60
PROMPT = tuple(range(3, 83))


def load(path: Path) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, local_files_only=True).eval()


def perturbed(model: torch.nn.Module, seed: int) -> torch.nn.Module:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=generator)
    return model


@torch.no_grad()
def expected(model: torch.nn.Module, ids: tuple[int, ...], start: int, temperature: float = 1.0) -> np.ndarray:
    logits = model(torch.tensor([ids])).logits[0].float() / temperature
    logprobs = logits.log_softmax(-1)[start - 1 : -1]
    return logprobs.gather(1, torch.tensor(ids[start:])[:, None])[:, 0].numpy()


def call(handle: Any, method: str, *args: Any) -> Any:
    return ray.get(getattr(handle, method).remote(*args), timeout=TIMEOUT_S)


def sample(handle: Any, temperature: float = 1.0, tokens: int = 24, prompt: tuple[int, ...] = PROMPT) -> Generation:
    return call(handle, "generate", prompt, Sampling(temperature, tokens), "test")


def publish(handle: Any, source: WeightSource, version: int) -> None:
    trainer = make_trainer("asyncrl_cpu", [handle], source, rank=0, timeout_s=TIMEOUT_S)
    call(handle, "pause")
    try:
        trainer.send_weights()
        call(handle, "update_weight_version", str(version))
    finally:
        call(handle, "resume")


@pytest.fixture
def restored(generator: Any, tiny_model: Path) -> Iterator[Any]:
    """The shared generator; its first weights are published again afterwards."""
    yield generator
    publish(generator, ModuleSource(load(tiny_model)), call(generator, "version") + 1)


@pytest.mark.parametrize("temperature", [1.0, 0.4])
def test_logprobs_are_those_of_the_distribution_sampled_from(
    generator: Any, tiny_model: Path, temperature: float
) -> None:
    answer = sample(generator, temperature)
    theirs = expected(load(tiny_model), PROMPT + answer.token_ids, len(PROMPT), temperature)
    assert len(answer.logprobs) == len(answer.token_ids) > 0
    np.testing.assert_allclose(answer.logprobs, theirs, atol=1e-3)
    assert answer.digest == token_digest(answer.token_ids)


def test_temperature_zero_is_greedy(generator: Any, tiny_model: Path) -> None:
    model, ids = load(tiny_model), list(PROMPT)
    answer = sample(generator, temperature=0.0)
    for token in answer.token_ids:
        assert token == int(model(torch.tensor([ids])).logits[0, -1].argmax())
        ids.append(token)
    np.testing.assert_allclose(answer.logprobs, expected(model, tuple(ids), len(PROMPT)), atol=1e-3)


def test_a_response_ends_with_the_end_token_or_at_the_limit(generator: Any) -> None:
    answers = [sample(generator, tokens=64, prompt=(*PROMPT, i)) for i in range(30)]
    assert {answer.finish for answer in answers} == {"stop", "length"}
    for answer in answers:
        assert (answer.token_ids[-1] == 2) == (answer.finish == "stop")
        assert 2 not in answer.token_ids[:-1]
        assert len(answer.token_ids) == 64 or answer.finish == "stop"


def test_score_agrees_with_transformers(generator: Any, tiny_model: Path) -> None:
    ids = tuple(int(i) for i in np.random.default_rng(0).integers(3, 256, 200))
    model = load(tiny_model)
    for start in (1, 150, 150):  # the last one meets a warm prefix cache
        np.testing.assert_allclose(call(generator, "score", ids, start), expected(model, ids, start), atol=1e-4)


@pytest.mark.parametrize("embeddings", ["tied", "untied"])
def test_published_weights_are_the_ones_that_answer(
    embeddings: str, tiny_model: Path, untied_model: Path, request: pytest.FixtureRequest
) -> None:
    tied = embeddings == "tied"
    handle = request.getfixturevalue("restored" if tied else "untied_generator")
    model = load(tiny_model if tied else untied_model)
    before = np.array(call(handle, "score", PROMPT, 10))
    first = call(handle, "version") + 1
    for version in (first, first + 1):  # two in a row: the second starts from re-packed weights
        perturbed(model, seed=version)
        publish(handle, ModuleSource(model), version)
        now = np.array(call(handle, "score", PROMPT, 10))
        np.testing.assert_allclose(now, expected(model, PROMPT, 10), atol=1e-3)
        assert np.abs(now - before).max() > 0.1
        before = now
        answer = sample(handle)
        assert answer.spans == (VersionSpan(version, 0, len(answer.token_ids)),)
        np.testing.assert_allclose(answer.logprobs, expected(model, PROMPT + answer.token_ids, len(PROMPT)), atol=1e-3)


def in_flight(handle: Any) -> list[Any]:
    """Twelve long requests, each with its first tokens made: the engine steps all of them at once."""
    requests = [handle.generate.remote((*PROMPT, i), Sampling(0.2, 400), str(i)) for i in range(3, 15)]
    sample(handle, tokens=4)
    return requests


def test_requests_in_flight_are_kept_and_carry_both_versions(restored: Any, tiny_model: Path) -> None:
    version = call(restored, "version")
    source = ModuleSource(load(tiny_model))
    requests = in_flight(restored)
    publish(restored, source, version + 1)
    answers = ray.get(requests, timeout=TIMEOUT_S)
    for answer in answers:
        starts, ends = [span.start for span in answer.spans], [span.end for span in answer.spans]
        assert [0, *ends] == [*starts, len(answer.token_ids)]
        assert all(start < end for start, end in zip(starts, ends, strict=True))
    assert any([span.version for span in answer.spans] == [version, version + 1] for answer in answers)


def test_requests_without_a_token_at_a_publish_meet_no_older_keys(restored: Any, tiny_model: Path) -> None:
    """Queued in the engine or come during the pause: what the new version alone answers, it prefilled alone."""
    version = call(restored, "version")
    model = perturbed(load(tiny_model), 3)
    trainer = make_trainer("asyncrl_cpu", [restored], ModuleSource(model), rank=0, timeout_s=TIMEOUT_S)
    prompts = [(*PROMPT, i) for i in range(3, 71)]
    sampling = Sampling(1.0, 100)
    requests = [restored.generate.remote(prompt, sampling, str(prompt[-1])) for prompt in prompts[:64]]
    ray.wait(requests, num_returns=1, timeout=TIMEOUT_S)  # 16 run at once: most others wait, their prefix in the cache
    call(restored, "pause")
    try:
        requests += [restored.generate.remote(prompt, sampling, str(prompt[-1])) for prompt in prompts[64:]]
        trainer.send_weights()
        call(restored, "update_weight_version", str(version + 1))
    finally:
        call(restored, "resume")
    answers = ray.get(requests, timeout=TIMEOUT_S)
    new = [i for i, answer in enumerate(answers) if answer.spans[0].version == version + 1]
    assert len(new) >= 20
    assert set(new) >= {64, 65, 66, 67}
    for i in new:
        theirs = expected(model, prompts[i] + answers[i].token_ids, len(prompts[i]))
        np.testing.assert_allclose(answers[i].logprobs, theirs, atol=1e-3)


def test_a_new_version_never_reuses_older_prefixes(restored: Any, tiny_model: Path) -> None:
    def cached() -> float:
        before = call(restored, "stats")["cached_prompt_tokens"]
        sample(restored, tokens=1)
        return call(restored, "stats")["cached_prompt_tokens"] - before

    cached()
    assert cached() >= 64  # 80 tokens, in whole blocks
    publish(restored, ModuleSource(load(tiny_model)), call(restored, "version") + 1)
    assert cached() == 0
    assert cached() >= 64


class BreaksHalfWay(WeightSource):
    def __init__(self, module: torch.nn.Module) -> None:
        self._whole = ModuleSource(module)

    def metadata(self) -> list[ParamMeta]:
        return self._whole.metadata()

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for i, pair in enumerate(self._whole):
            if i == 3:
                raise OSError("the learner's disk is gone")
            yield pair


class NamesUnknown(BreaksHalfWay):
    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in self._whole:
            yield name.replace("layers", "storeys"), tensor


def test_a_transfer_that_breaks_off_leaves_the_old_weights_serving(restored: Any, tiny_model: Path) -> None:
    model = load(tiny_model)
    version = call(restored, "version")
    with pytest.raises(OSError, match="disk is gone"):
        publish(restored, BreaksHalfWay(perturbed(load(tiny_model), 1)), version + 1)
    assert sample(restored).spans[0].version == version
    np.testing.assert_allclose(call(restored, "score", PROMPT, 1), expected(model, PROMPT, 1), atol=1e-3)


def test_weights_that_do_not_load_fence_the_generator_until_a_whole_publish(restored: Any, tiny_model: Path) -> None:
    source, model = NamesUnknown(load(tiny_model)), perturbed(load(tiny_model), 2)
    requests = in_flight(restored)
    call(restored, "pause")
    requests.append(restored.generate.remote(PROMPT, Sampling(1.0, 8), "late"))
    with pytest.raises(RuntimeError, match="finish_weight_update failed in"):
        publish(restored, source, 99)
    with pytest.raises(RuntimeError, match="publish again"):
        sample(restored)
    for request in requests:
        with pytest.raises(RuntimeError, match="publish again"):
            ray.get(request, timeout=TIMEOUT_S)
    publish(restored, ModuleSource(model), call(restored, "version") + 1)
    np.testing.assert_allclose(call(restored, "score", PROMPT, 1), expected(model, PROMPT, 1), atol=1e-3)
    assert sample(restored).token_ids


class Counting(NamesUnknown):
    yielded = 0

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for pair in self._whole:
            self.yielded += 1
            yield pair


class Unreachable:
    def start_weight_update(self) -> None:
        raise RuntimeError("generator-0 is gone")


@pytest.mark.parametrize("is_sender", [True, False])
def test_every_rank_walks_the_whole_source_even_if_the_transfer_fails(tiny_model: Path, is_sender: bool) -> None:
    source = Counting(load(tiny_model))
    trainer = CpuTrainer(client=Unreachable(), source=source, is_sender=is_sender)
    with pytest.raises(RuntimeError, match="is gone") if is_sender else nullcontext():
        trainer.send_weights()
    assert source.yielded == len(source.metadata())


def test_resume_may_be_called_at_any_time(generator: Any) -> None:
    call(generator, "resume")
    call(generator, "pause")
    call(generator, "resume")
    call(generator, "resume")
    assert sample(generator).token_ids


def test_a_prompt_beyond_the_limit_is_refused(generator: Any) -> None:
    with pytest.raises(ValueError, match="512"):
        sample(generator, prompt=tuple([5] * 600))


def test_counters_count_what_was_served(generator: Any) -> None:
    before = call(generator, "stats")
    answers = ray.get(
        [generator.generate.remote(PROMPT, Sampling(1.0, 8), str(i)) for i in range(5)], timeout=TIMEOUT_S
    )
    after = call(generator, "stats")
    assert after["requests"] - before["requests"] == 5
    assert after["prompt_tokens"] - before["prompt_tokens"] == 5 * len(PROMPT)
    assert after["tokens_generated"] - before["tokens_generated"] == sum(len(a.token_ids) for a in answers)


def alive(pids: list[int]) -> list[int]:
    return [pid for pid in pids if psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE]


def gone_within(pids: list[int], seconds: float) -> bool:
    end = time.monotonic() + seconds
    while alive(pids) and time.monotonic() < end:
        time.sleep(0.1)
    return not alive(pids)


@pytest.mark.parametrize("end", ["shutdown", "kill -9 actor", "kill -9 engine"])
def test_a_fleet_leaves_no_process(ray_cluster: None, tiny_model: Path, end: str) -> None:
    """Served through a fleet, then ended in order, or by killing the actor or its engine under a request."""

    async def main() -> None:
        config = EngineConfig(max_num_seqs=4, max_model_len=512, kv_cache_gib=0.05)
        before = set(engine_processes())
        fleet = Fleet.create(config, str(tiny_model), "float32", seed=0)
        await fleet.start()
        engines = sorted(set(engine_processes()) - before)
        assert len(engines) == 1
        actor = psutil.Process(engines[0]).parent()
        answer = await fleet.generate(PROMPT, Sampling(1.0, 4), key="0.0.0", near="0")
        assert len(answer.token_ids) <= 4
        if end == "shutdown":
            await fleet.shutdown()
        else:
            late = asyncio.create_task(fleet.generate(PROMPT, Sampling(0.2, 400), key="0.0.1", near="0"))
            await asyncio.sleep(0.1)
            of_actor = end == "kill -9 actor"
            os.kill(actor.pid if of_actor else engines[0], signal.SIGKILL)
            cause = "The actor" if of_actor else "its engine process ended"
            with pytest.raises(GenerationFailed, match=f"all 1 generators are dead; .*generator-0 died: {cause}"):
                await late
            assert (await fleet.stats()).get("requests") == (None if of_actor else 1)
            await fleet.shutdown()
        assert gone_within([*engines, actor.pid], seconds=10)

    asyncio.run(main())


def engine_processes() -> list[int]:
    """Engine processes below this test's own Ray cluster."""
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            if "EngineCore" in "".join(process.cmdline()[:1]) or "EngineCore" in process.name():
                found.append(process.pid)
        except psutil.Error:
            continue
    return found
