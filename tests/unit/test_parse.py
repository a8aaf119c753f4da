"""The validators of SPARK and ReAct on a table of responses (algorithms.md, section 7, test 9)."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.text.parse import parse
from asyncrl.types import Parsed

GOOD = "<explore>seek mug in desk</explore>\n<action>open desk</action>"


@pytest.mark.parametrize(
    ("text", "action", "tag", "valid", "explores"),
    [
        (GOOD, "open desk", "explore", True, True),
        ("<think>now</think><action> Go North </action>", "Go North", "think", True, False),
        ("<THINK>now</Think>\n\n<ACTION>go</ACTION>", "go", "think", True, False),
        ("Sure! <think>a\nb</think> so <action>go</action> bye", "go", "think", True, False),
        ("<think></think><action>go</action>", "go", "think", False, False),
        ("<think> \n</think><action>go</action>", "go", "think", False, False),
        ("<explore> </explore><action>go</action>", "go", "explore", False, True),
        ("<action>go</action>", "go", "", False, False),
        ("<action>go</action><think>late</think>", "go", "think", False, False),
        ("<think>a</think><think>b</think><action>go</action>", "go", "", False, False),
        ("<think>a</think><explore>b</explore><action>go</action>", "go", "", False, True),
        ("<explore>a</explore><explore>b</explore><action>go</action>", "go", "", False, True),
        ("<think>a</think><action>go</action><action>stop</action>", "", "think", False, False),
        ("<explore>a</explore><action>go", "", "explore", False, True),
        ("<explore>a<action>go</action>", "go", "", False, False),
        ("<think>a <think>b</think></think><action>go</action>", "go", "think", True, False),
        ("<think><explore>a</explore></think><action>go</action>", "go", "", False, True),
        ("<think>\u597d</think><action>go</action>", "go", "think", False, False),
        ("<think>a</think><action>\u8d70</action>", "\u8d70", "think", False, False),
        ("<think>a</think><action></action>", "", "think", True, False),
        ("<plan>a</plan><action>go</action>", "go", "", False, False),
        ("", "", "", False, False),
        ("hello", "", "", False, False),
    ],
)
def test_spark(text, action, tag, valid, explores):
    assert parse(text, "spark") == Parsed(action, tag, valid, explores, void=not action)


@pytest.mark.parametrize(
    ("text", "action", "valid"),
    [
        ("<think>a</think>\n<action>Go North</action>", "go north", True),
        (" <THINK>a</THINK> <action> go </action>\n", "go", True),
        ("<think></think><action>go</action>", "go", True),
        ("so <think>a</think><action>go</action>", "go", False),
        ("<think>a</think> then <action>go</action>", "go", False),
        ("<think>a</think><action>go</action><action>stop</action>", "go", False),
        ("<think>a</think><think>b</think><action>go</action>", "go", False),
        ("<think>a <think>b</think><action>go</action>", "go", False),
        ("<think>\u597d</think><action>go</action>", "go", False),
        ("< action >Go</ action >", "go", False),
        ("<think>a</think><action>go", "<think>a</think><action>go", False),
        ("x" * 50, "x" * 30, False),
        ("", "", False),
    ],
)
def test_react(text, action, valid):
    parsed = parse(text, "react")
    assert (parsed.action, parsed.valid, parsed.explores) == (action, valid, False)


@pytest.mark.parametrize(
    ("text", "method", "void"),
    [
        ("<think>a</think><action>go</action>", "spark", False),
        ("<action>go</action>", "spark", False),
        ("<think>a</think><action> </action>", "spark", True),
        ("<action>go</action><action>stop</action>", "spark", True),
        ("hello", "spark", True),
        ("<think>a</think><action>go</action>", "react", False),
        ("so < action >go</ action >", "react", False),
        ("<think>a</think><action></action>", "react", True),
        ("<action> </action> and more", "react", True),
        ("hello", "react", True),
    ],
)
def test_a_response_without_an_action_is_void(text, method, void):
    assert parse(text, method).void is void


@given(st.text(alphabet=st.sampled_from("<>/thinkexploraci \u597d\n")), st.sampled_from(["spark", "react"]))
def test_any_text_gets_an_answer(text, method):
    parsed = parse(text, method)
    assert not parsed.valid or parsed.tag


@given(st.lists(st.sampled_from(["<think>", "</think>", "<explore>", "</explore>", "<action>", "</action>", "a", " "])))
def test_a_valid_spark_response_reasons_before_it_acts(parts):
    text = "".join(parts)
    parsed = parse(text, "spark")
    if parsed.valid:
        reason, action = text.index(f"<{parsed.tag}>"), text.index("<action>")
        assert reason < action or f"</{parsed.tag}>" in text[:action]
        assert text.count("</action>") >= 1
