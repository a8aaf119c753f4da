"""Demonstrations, their annotation and the supervised rows."""

import random
from collections.abc import Sequence

import pytest

from asyncrl.coldstart.annotate import DemoStep, annotate
from asyncrl.coldstart.rows import demonstrate, expert_rows
from asyncrl.coldstart.texts import environment_texts
from asyncrl.config.coldstart import SftConfig
from asyncrl.config.prompt import PromptConfig
from asyncrl.env import Env, EnvSpec, find_env
from asyncrl.model.tiny import train_tokenizer
from asyncrl.text.parse import parse
from asyncrl.text.prompt import PromptEncoder
from asyncrl.types import Observation, Step, Task
from envs.pantry import Pantry

PANTRY = find_env("pantry")
PROMPT = PromptConfig(style="compact", history=2)


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(environment_texts(PANTRY, "train", PROMPT, 40), 512)


def demo(*steps: tuple[str, str]) -> list[DemoStep]:
    return [DemoStep(Observation(text, "goal"), action) for text, action in steps]


def test_searching_explores_and_the_rest_thinks():
    responses = annotate(
        demo(
            ("hall", "go kitchen"),
            ("kitchen: box shut", "open box"),
            ("kitchen: box mug", "take mug"),
            ("you hold mug", "go study"),
            ("study", "put mug in desk"),
        )
    )
    assert responses == [
        "<explore>seek mug in kitchen</explore>\n<action>go kitchen</action>",
        "<explore>seek mug in box</explore>\n<action>open box</action>",
        "<think>now take mug</think>\n<action>take mug</action>",
        "<think>now go study</think>\n<action>go study</action>",
        "<think>now put mug</think>\n<action>put mug in desk</action>",
    ]


def test_scienceworld_actions_are_understood():
    steps = demo(
        ("a hallway", "go to kitchen"),
        ("a kitchen", "look around"),
        ("a thermometer is here", "pick up thermometer"),
        ("you hold it", "look at thermometer"),
        ("fine", "open door to greenhouse"),
        ("open", "wait1"),
        ("time", "focus on banana"),
    )
    assert [response.split("\n")[0] for response in annotate(steps)] == [
        "<explore>seek thermometer in kitchen</explore>",
        "<explore>seek thermometer in here</explore>",
        "<think>now pick thermometer</think>",
        "<explore>seek banana in thermometer</explore>",
        "<explore>seek banana in door</explore>",
        "<think>now wait1</think>",
        "<think>now focus banana</think>",
    ]


def test_a_slip_is_not_what_was_sought():
    steps = [
        *demo(("hall", "go kitchen")),
        DemoStep(Observation("x", "g"), "take egg", slip=True),
        *demo(("y", "take mug")),
    ]
    assert "seek mug" in annotate(steps)[0]


def test_hesitation_says_the_reasoning_again_and_the_action_once():
    steps = demo(("hall", "go kitchen"), ("kitchen: mug", "take mug"))
    more = iter([True, True, False, False])
    assert annotate(steps, hesitates=lambda: next(more)) == [
        "<explore>seek mug in kitchen, seek mug in kitchen, seek mug in kitchen</explore>\n<action>go kitchen</action>",
        "<think>now take mug</think>\n<action>take mug</action>",
    ]


def test_the_share_of_hesitation_is_the_one_asked_for(tokenizer):
    def responses(hesitation: float) -> list[str]:
        sft = SftConfig(trajectories=60, hesitation=hesitation)
        return [tokenizer.decode(ids) for _, ids in expert_rows(PANTRY, "train", tokenizer, PROMPT, sft)]

    plain, hesitant = responses(0.0), responses(0.5)
    assert [text.split("<action>")[1] for text in plain] == [text.split("<action>")[1] for text in hesitant]
    assert not any(", " in text for text in plain)
    share = sum("," in text.split("</")[0] for text in hesitant) / len(hesitant)
    assert share == pytest.approx(0.5, abs=0.1)


@pytest.mark.parametrize("method", ["spark", "react"])
def test_every_annotated_response_is_valid_and_keeps_its_action(method):
    env, rng, checked = Pantry(hunch=0.5), random.Random(0), 0
    for i in range(100):
        steps = demonstrate(env, Task("pantry", str(i)), 0.2, rng) or []
        for step, response in zip(steps, annotate(steps, method), strict=True):
            parsed = parse(response, method)
            assert parsed.valid
            assert parsed.action == step.action
            checked += 1
    assert checked > 100


def test_without_slips_the_demonstration_is_the_expert():
    env = Pantry()
    for i in range(30):
        task = Task("pantry", str(i))
        steps = demonstrate(env, task, 0.0, random.Random(0))
        assert (steps and [step.action for step in steps]) == env.expert(task)


def test_rows_are_the_prompts_of_training_and_end_with_the_end_token(tokenizer):
    sft = SftConfig(trajectories=1, slip=0.0, list_actions=True)
    rows = expert_rows(PANTRY, "train", tokenizer, PROMPT, sft)
    ids = list(Pantry.tasks("train"))
    random.Random(sft.seed).shuffle(ids)
    env, encoder = Pantry(), PromptEncoder(tokenizer, PROMPT, Pantry.role)
    task = next(task for id in ids if env.expert(task := Task("pantry", id)))
    observation, past = env.reset(task), []
    for prompt, response in rows:
        assert prompt == encoder.encode(observation, past)
        assert response[-1] == tokenizer.eos_token_id
        action = parse(encoder.decode(response), "spark").action
        past.append((observation, action))
        observation = env.step(action).observation
    assert [action for _, action in past] == env.expert(task)


def test_the_cold_start_can_leave_the_actions_out(tokenizer):
    with_list, without = (
        expert_rows(PANTRY, "train", tokenizer, PROMPT, SftConfig(trajectories=5, list_actions=shown))
        for shown in (True, False)
    )
    assert [response for _, response in with_list] == [response for _, response in without]
    assert all(len(long) > len(short) for (long, _), (short, _) in zip(with_list, without, strict=True))


def test_slips_are_seen_and_not_trained_on(tokenizer):
    rng, env = random.Random(0), Pantry()
    demos = [steps for i in range(300) if (steps := demonstrate(env, Task("pantry", str(i)), 0.2, rng))]
    slips = sum(step.slip for steps in demos for step in steps)
    assert slips > 20
    sft = SftConfig(trajectories=60, slip=0.2)
    rows = expert_rows(PANTRY, "train", tokenizer, PROMPT, sft)
    assert len(rows) < sum(len(steps) for steps in demos[:60])
    assert rows == expert_rows(PANTRY, "train", tokenizer, PROMPT, sft)


def test_the_demonstrator_has_options_of_its_own(tokenizer):
    with pytest.raises(ValueError, match="hunch must be from 0 to 1, got 3"):
        expert_rows(PANTRY, "train", tokenizer, PROMPT, SftConfig(demonstrator={"hunch": 3}))


class Scripted(Env):
    """Two steps; its expert knows the whole episode only, and only for task "yes"."""

    role = "You walk."
    max_turns = 5

    @classmethod
    def tasks(cls, split: str) -> Sequence[str]:
        return ["no", "yes"] if split == "train" else ["no"]

    def reset(self, task: Task) -> Observation:
        self._steps = 0
        return Observation("start", "arrive")

    def step(self, action: str) -> Step:
        self._steps += 1
        done = self._steps == 2
        return Step(Observation("on the way", "arrive"), float(done), done, False, {"success": True} if done else {})

    def expert(self, task: Task) -> list[str] | None:
        return ["go on", "stop"] if task.id == "yes" else None


SCRIPTED = EnvSpec("scripted", f"{__name__}:Scripted")


def test_an_expert_of_whole_episodes_will_do(tokenizer):
    rows = expert_rows(SCRIPTED, "train", tokenizer, PROMPT, SftConfig(trajectories=9))
    assert [tokenizer.decode(response[:-1]).split("\n")[1] for _, response in rows] == [
        "<action>go on</action>",
        "<action>stop</action>",
    ]


def test_an_expert_of_whole_episodes_cannot_slip_and_none_at_all_is_reported(tokenizer):
    with pytest.raises(ValueError, match="knows only whole episodes"):
        expert_rows(SCRIPTED, "train", tokenizer, PROMPT, SftConfig(slip=0.1))
    with pytest.raises(ValueError, match="no successful expert trajectory in split 'test'"):
        expert_rows(SCRIPTED, "test", tokenizer, PROMPT, SftConfig())


def test_environment_texts_hold_prompts_and_responses():
    texts = list(environment_texts(PANTRY, "train", PROMPT, episodes=5))
    assert any(text.startswith("<explore>seek") for text in texts)
    assert any("You hold nothing." in text for text in texts)
    assert texts == list(environment_texts(PANTRY, "train", PROMPT, episodes=5))
