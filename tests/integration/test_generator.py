"""A real vLLM engine on the CPU: what it samples, what it scores, and what a publish does to it."""

import asyncio
import itertools
import logging
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
import ray
import torch
from transformers import AutoModelForCausalLM
from vllm.distributed.weight_transfer import WeightTransferTrainerFactory

from asyncrl.config.engine import EngineConfig
from asyncrl.engine.base import EngineFenced
from asyncrl.engine.client import GeneratorClient
from asyncrl.engine.fleet import Fleet, GenerationFailed
from asyncrl.engine.transfer import ModuleSource, ParamMeta, Sender, WeightSource, receive_within, send_buckets
from asyncrl.types import Generation, Sampling, VersionSpan, token_digest

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

TIMEOUT_S = 60
VERSIONS = itertools.count(1)
"""Versions not yet published to any generator."""
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


def served(handle: Any) -> int:
    """The version that answers."""
    return sample(handle, tokens=1).spans[-1].version


def publish(handle: Any, source: WeightSource, version: int) -> None:
    """What a fleet and a learner rank do, for one generator; raises as its ``resume`` does."""
    sender = Sender("asyncrl_cpu", [handle], source, rank=0, timeout_s=TIMEOUT_S)
    call(handle, "pause")
    try:
        if not sender.send([0]):
            call(handle, "update_weight_version", str(version))
    finally:
        call(handle, "resume", str(version))


@pytest.fixture
def restored(generator: Any, tiny_model: Path) -> Iterator[Any]:
    """The shared generator; its first weights are published again afterwards."""
    yield generator
    publish(generator, ModuleSource(load(tiny_model)), next(VERSIONS))


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


@pytest.fixture(scope="module")
def untied_fleet(ray_cluster: None, untied_model: Path) -> Iterator[tuple[Fleet, list[int]]]:
    """One generator of a model with an output head of its own, and the processes of its engine and its actor.

    It recomputes keys and values after a publish.
    """
    config = EngineConfig(max_num_seqs=16, max_model_len=512, kv_cache_gib=0.05, kv="recompute")
    fleet = Fleet.create(config, str(untied_model), "float32", seed=0)
    asyncio.run(fleet.start())
    yield fleet, list(actor_and_engine(fleet.handles[0]))
    asyncio.run(fleet.shutdown())


@pytest.fixture
def untied(untied_fleet: tuple[Fleet, list[int]]) -> Any:
    return untied_fleet[0].handles[0]


@pytest.mark.parametrize("embeddings", ["tied", "untied"])
def test_published_weights_are_the_ones_that_answer(
    embeddings: str, tiny_model: Path, untied_model: Path, request: pytest.FixtureRequest
) -> None:
    tied = embeddings == "tied"
    handle = request.getfixturevalue("restored" if tied else "untied")
    model = load(tiny_model if tied else untied_model)
    before = np.array(call(handle, "score", PROMPT, 10))
    for version in (next(VERSIONS), next(VERSIONS)):  # two in a row: the second starts from re-packed weights
        perturbed(model, seed=version)
        publish(handle, ModuleSource(model), version)
        now = np.array(call(handle, "score", PROMPT, 10))
        np.testing.assert_allclose(now, expected(model, PROMPT, 10), atol=1e-3)
        assert np.abs(now - before).max() > 0.1
        before = now
        answer = sample(handle)
        assert answer.spans == (VersionSpan(version, 0, len(answer.token_ids)),)
        np.testing.assert_allclose(answer.logprobs, expected(model, PROMPT + answer.token_ids, len(PROMPT)), atol=1e-3)


IN_FLIGHT = Sampling(0.2, 400)


def in_flight(handle: Any) -> list[Any]:
    """Twelve long requests, each with its first tokens made: the engine steps all of them at once."""
    requests = [handle.generate.remote((*PROMPT, i), IN_FLIGHT, str(i)) for i in range(3, 15)]
    sample(handle, tokens=4)
    return requests


@torch.no_grad()
def mixed(old: torch.nn.Module, new: torch.nn.Module, ids: tuple[int, ...], start: int, seen: int) -> np.ndarray:
    """Log-probs of ``ids[start:]`` where ``old`` has read the first ``seen`` tokens and ``new`` the rest, on its KV."""
    before = old(torch.tensor([ids[:seen]]), use_cache=True)
    after = new(torch.tensor([ids[seen:]]), past_key_values=before.past_key_values)
    logits = torch.cat([before.logits[0], after.logits[0]]).float() / IN_FLIGHT.temperature
    return logits.log_softmax(-1)[start - 1 : -1].gather(1, torch.tensor(ids[start:])[:, None])[:, 0].numpy()


@pytest.mark.parametrize("kv", ["keep", "recompute"])
def test_each_part_of_a_turn_over_a_publish_has_the_logprobs_of_its_version(
    kv: str, tiny_model: Path, untied_model: Path, request: pytest.FixtureRequest
) -> None:
    """Kept keys and values are those of the old weights; recomputed ones are as if the new weights had read it all."""
    handle = request.getfixturevalue("restored" if kv == "keep" else "untied")
    path = tiny_model if kv == "keep" else untied_model
    old, new = load(path), perturbed(load(path), 4)
    version, following = next(VERSIONS), next(VERSIONS)
    publish(handle, ModuleSource(old), version)
    requests = in_flight(handle)
    publish(handle, ModuleSource(new), following)
    answers = ray.get(requests, timeout=TIMEOUT_S)
    spanning = [i for i, answer in enumerate(answers) if len(answer.spans) == 2]
    assert spanning
    for i in spanning:
        (first, start, switch), (second, again, end) = answers[i].spans
        ids = (*PROMPT, i + 3, *answers[i].token_ids)
        assert (first, start, second, again, end) == (version, 0, following, switch, len(answers[i].token_ids))
        length = len(PROMPT) + 1
        theirs = mixed(old, new, ids, length, seen=length + switch - 1)
        afresh = expected(new, ids, length, IN_FLIGHT.temperature)
        if kv == "recompute":
            theirs[switch:] = afresh[switch:]
        np.testing.assert_allclose(answers[i].logprobs, theirs, atol=5e-3)
        if kv == "keep":
            assert np.abs(theirs[switch:] - afresh[switch:]).max() > 0.05


def test_requests_without_a_token_at_a_publish_meet_no_older_keys(restored: Any, tiny_model: Path) -> None:
    """Queued in the engine or come during the pause: what the new version alone answers, it prefilled alone."""
    version = next(VERSIONS)
    model = perturbed(load(tiny_model), 3)
    sender = Sender("asyncrl_cpu", [restored], ModuleSource(model), rank=0, timeout_s=TIMEOUT_S)
    prompts = [(*PROMPT, i) for i in range(3, 71)]
    sampling = Sampling(1.0, 100)
    requests = [restored.generate.remote(prompt, sampling, str(prompt[-1])) for prompt in prompts[:64]]
    ray.wait(requests, num_returns=1, timeout=TIMEOUT_S)  # 16 run at once: most others wait, their prefix in the cache
    call(restored, "pause")
    try:
        requests += [restored.generate.remote(prompt, sampling, str(prompt[-1])) for prompt in prompts[64:]]
        assert sender.send([0]) == {}
        call(restored, "update_weight_version", str(version))
    finally:
        call(restored, "resume", str(version))
    answers = ray.get(requests, timeout=TIMEOUT_S)
    new = [i for i, answer in enumerate(answers) if answer.spans[0].version == version]
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
    publish(restored, ModuleSource(load(tiny_model)), next(VERSIONS))
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
    """One of three parts of a layer's attention projection cannot be loaded, after the two others have been."""

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in self._whole:
            yield name.replace("layers.1.self_attn.v_proj", "layers.1.self_attn.w_proj"), tensor


@pytest.mark.parametrize("broken", [BreaksHalfWay, NamesUnknown])
def test_an_incomplete_transfer_fences_the_generator_until_it_is_refitted(
    broken: type[BreaksHalfWay], restored: Any, tiny_model: Path
) -> None:
    source, model = broken(perturbed(load(tiny_model), 1)), perturbed(load(tiny_model), 2)
    requests = in_flight(restored)
    call(restored, "pause")
    requests.append(restored.generate.remote(PROMPT, Sampling(1.0, 8), "late"))
    with pytest.raises((OSError, EngineFenced), match=r"disk is gone|did not reach it"):
        publish(restored, source, next(VERSIONS))
    requests.append(restored.generate.remote(PROMPT, Sampling(1.0, 8), "after"))
    *ended, late, after = [refused(request) for request in requests]
    assert any(ended)  # most were in flight; one may have come to its end just before
    assert late
    assert after
    publish(restored, ModuleSource(model), next(VERSIONS))
    np.testing.assert_allclose(call(restored, "score", PROMPT, 1), expected(model, PROMPT, 1), atol=1e-3)
    assert sample(restored).token_ids


def refused(request: ray.ObjectRef) -> bool:
    try:
        ray.get(request, timeout=TIMEOUT_S)
    except EngineFenced as error:
        return "did not reach it" in str(error)
    return False


class Unreachable:
    """Fails at the end of a transfer."""

    def init_weight_transfer_engine(self, request: object) -> None: ...

    def start_weight_update(self, round: int) -> None: ...

    def update_weights(self, round: int, request: object) -> None: ...

    def finish_weight_update(self, round: int) -> None:
        raise OSError("its memory is full")


def test_who_fails_leaves_the_round_and_the_others_hold_the_weights(restored: Any, tiny_model: Path) -> None:
    model, version = perturbed(load(tiny_model), 5), next(VERSIONS)
    broken = ray.remote(Unreachable).options(num_cpus=0).remote()
    gone = ray.remote(Unreachable).options(num_cpus=0).remote()
    ray.kill(gone)
    sender = Sender("asyncrl_cpu", [broken, gone, restored], ModuleSource(model), rank=0, timeout_s=TIMEOUT_S)
    call(restored, "pause")
    failed = sender.send([0, 1, 2])
    assert failed.keys() == {0, 1}
    assert failed[0] == "finish_weight_update failed: its memory is full"
    assert sender.send([2]) == {}
    call(restored, "update_weight_version", str(version))
    call(restored, "resume", str(version))
    np.testing.assert_allclose(call(restored, "score", PROMPT, 1), expected(model, PROMPT, 1), atol=1e-3)
    ray.kill(broken)


class Counting(BreaksHalfWay):
    yielded = 0

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for pair in self._whole:
            self.yielded += 1
            yield pair


@pytest.mark.parametrize("is_sender", [True, False])
def test_every_rank_walks_the_whole_source_even_if_the_transfer_fails(
    ray_cluster: None, tiny_model: Path, is_sender: bool
) -> None:
    source = Counting(load(tiny_model))
    gone = ray.remote(Unreachable).options(num_cpus=0).remote()
    ray.kill(gone)
    client = GeneratorClient({0: gone}, TIMEOUT_S)
    send_buckets(client, source, is_sender)
    assert source.yielded == len(source.metadata())
    assert client.failed.keys() == ({0} if is_sender else set())


class Willing:
    """A handle of a generator that answers everything."""

    def __getattr__(self, method: str) -> Any:
        return SimpleNamespace(remote=lambda *args: ray.put(None))


@pytest.mark.parametrize("meeting_fails", [False, True])
def test_a_group_is_built_anew_when_its_members_change_or_fail(
    ray_cluster: None, tiny_model: Path, monkeypatch: pytest.MonkeyPatch, meeting_fails: bool
) -> None:
    groups: list[Communicator] = []

    class Trainer:
        """vLLM's for NCCL, without the broadcast; it waits in vain for a generator that does not come."""

        def __init__(self, info: Any, client: GeneratorClient, source: WeightSource) -> None:
            self._client, self._source = client, source
            self.model_update_group = Communicator(info.world_size)
            groups.append(self.model_update_group)
            client.init_weight_transfer_engine({"rank_offset": 1})
            if client.failed and meeting_fails:
                raise RuntimeError("1 of 3 did not come")

        def send_weights(self) -> None:
            self._client.start_weight_update()
            for _ in self._source:
                pass

    monkeypatch.setattr(WeightTransferTrainerFactory, "trainer_init", lambda info, **given: Trainer(info, **given))
    source = Counting(load(tiny_model))
    gone = ray.remote(Unreachable).options(num_cpus=0).remote()
    ray.kill(gone)
    sender = Sender("nccl", [Willing(), Willing(), gone], source, rank=0, timeout_s=TIMEOUT_S)
    assert [sender.send([0, 1]), sender.send([0, 1]), sender.send([0])] == [{}] * 3
    assert [(group.world_size, group.available) for group in groups] == [(3, False), (2, True)]
    failed = sender.send([0, 2])
    assert (failed[0], sorted(failed)) == ("", [0, 2])
    assert "died" in failed[2]
    assert sender.send([0]) == {}
    assert [group.world_size for group in groups] == [3, 2, 3, 2]
    assert groups[-1].available
    assert source.yielded == 5 * len(source.metadata())


class Communicator:
    """vLLM's, as far as a receiver that waits in it can tell."""

    def __init__(self, world_size: int = 2) -> None:
        self.world_size = world_size
        self.available = True
        self._ended = threading.Event()

    def destroy(self) -> None:
        self.available = False
        self._ended.set()

    def broadcast(self) -> None:
        self._ended.wait(TIMEOUT_S)


class Worker:
    """vLLM's worker in a broadcast of two chunks that nobody sends."""

    def __init__(self) -> None:
        self.weight_transfer_engine = self
        self.model_update_group = Communicator()

    def update_weights(self, update: object) -> None:
        for _ in range(2):
            self.model_update_group.broadcast()


def test_a_broadcast_that_never_comes_is_left() -> None:
    began = time.monotonic()
    with pytest.raises(TimeoutError, match=r"0\.1 s"):
        receive_within(Worker(), {}, seconds=0.1)
    assert time.monotonic() - began < 10


def test_resume_may_be_called_at_any_time(generator: Any) -> None:
    version = str(served(generator))
    call(generator, "resume", version)
    call(generator, "pause")
    call(generator, "resume", version)
    call(generator, "resume", version)
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
    spent = {name: after[name] - before[name] for name in ("seconds", "idle_s", "paused_s")}
    assert 0 < max(answer.seconds for answer in answers) <= spent["seconds"] - spent["idle_s"] + 0.01
    assert spent["paused_s"] == 0
    version = str(served(generator))
    call(generator, "pause")
    call(generator, "resume", version)
    assert call(generator, "stats")["paused_s"] > before["paused_s"]


def alive(pids: list[int]) -> list[int]:
    return [pid for pid in pids if psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE]


def gone_within(pids: list[int], seconds: float) -> bool:
    end = time.monotonic() + seconds
    while alive(pids) and time.monotonic() < end:
        time.sleep(0.1)
    return not alive(pids)


def test_a_fleet_goes_on_without_the_dead_and_leaves_no_process(
    ray_cluster: None, tiny_model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Of two, the actor of one is killed under a request, then the engine of the other."""
    caplog.set_level(logging.DEBUG, "asyncrl.engine.fleet")

    async def main() -> None:
        config = EngineConfig(generators=2, max_num_seqs=4, max_model_len=512, kv_cache_gib=0.05)
        fleet = Fleet.create(config, str(tiny_model), "float32", seed=0)
        await fleet.start()
        (first_actor, first_engine), (second_actor, second_engine) = map(actor_and_engine, fleet.handles)
        requests = [
            asyncio.create_task(fleet.generate(PROMPT, Sampling(0.2, 400), key=f"{near}.0.0", near=str(near)))
            for near in range(2)
        ]
        await asyncio.sleep(0.1)
        os.kill(first_actor, signal.SIGKILL)
        answers = await asyncio.gather(*requests)
        assert all(answer.token_ids for answer in answers)
        assert "died: The actor" in caplog.text
        # More than run at once: whichever end early, some are under way.
        late = [fleet.generate(PROMPT, Sampling(0.2, 400), key=f"0.0.{n}", near="0") for n in range(1, 13)]
        waiting = asyncio.gather(*late)
        await asyncio.sleep(0.1)
        os.kill(second_engine, signal.SIGKILL)
        with pytest.raises(GenerationFailed, match=r"all 2 generators are dead; .* died: its engine process ended"):
            await waiting
        assert (await fleet.stats())["requests"] >= 2  # the second's actor outlives its engine
        await fleet.shutdown()
        assert gone_within([first_actor, first_engine, second_actor, second_engine], seconds=10)

    asyncio.run(main())


def test_a_fleet_that_is_shut_down_leaves_no_process(untied_fleet: tuple[Fleet, list[int]]) -> None:
    """Last of those that use it."""
    fleet, processes = untied_fleet
    assert alive(processes) == processes
    asyncio.run(fleet.shutdown())
    assert gone_within(processes, seconds=10)


def actor_and_engine(handle: Any) -> tuple[int, int]:
    """Their process ids, by the actor's own account: the process table has been seen without living engines' titles."""
    pids = handle.__ray_call__.remote(lambda _: (os.getpid(), *(c.pid for c in multiprocessing.active_children())))
    actor, engine = ray.get(pids, timeout=TIMEOUT_S)
    return actor, engine
