"""The example of docs/environments.md: short, sound, and printed as it is."""

import re
from pathlib import Path

from asyncrl.config.load import load
from asyncrl.env import find_env
from asyncrl.types import Task
from envs.check import check
from examples.repair import CAUSES, PARTS, Repair

ROOT = Path(__file__).parents[2]


def test_it_is_short_and_the_page_prints_it_whole() -> None:
    code = (ROOT / "examples/repair.py").read_text()
    assert len(code.splitlines()) < 60
    page = (ROOT / "docs/environments.md").read_text()
    assert re.findall(r"```python\n(.*?)```", page, re.DOTALL)[0] == code


def test_it_keeps_the_protocol() -> None:
    report = check(find_env("examples.repair:Repair"), tasks=10)
    assert report.passed, "\n".join(report.lines())
    assert 0 < report.figures["expert_success"] < 1


def test_its_configuration_is_valid() -> None:
    assert load(ROOT / "examples/repair.yaml").env.spec.env_class().__name__ == "Repair"


def test_who_knows_the_causes_does_much_better_than_the_expert() -> None:
    env, solved, informed = Repair(), 0, 0
    for one in env.tasks("test"):
        solved += env.expert(task := Task("repair", one)) is not None
        symptom = env.reset(task).text.removeprefix("The machine ").removesuffix(".")
        looks = [CAUSES[symptom], *(part for part in PARTS if part != CAUSES[symptom])][: env.max_turns - 1]
        informed += env.worn in looks
    assert solved < 120 and informed > 170


def test_the_spare_part_is_there_once() -> None:
    env = Repair()
    env.reset(Task("repair", "0"))
    assert env.step("replace part")[1:] == (0.0, True, False, {"success": False})
    env.reset(Task("repair", "0"))
    assert env.step("kick it").observation.text.endswith("Nothing happens.")
    assert env.step(f"inspect {env.worn}").observation.text.endswith("is worn.")
    assert env.step("replace part")[1:] == (1.0, True, False, {"success": True})
