"""Exact match as SQuAD scores it. Invariant: two texts match when nothing but case, punctuation, articles and space
differs.

Source: the evaluation script of SQuAD 1.1 (Rajpurkar et al. 2016), which Search-R1 and T2PO score by.
"""

import re
import string
from collections.abc import Iterable

_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(a|an|the)\b")


def normalise(text: str) -> str:
    """Lower case, without ASCII punctuation, without articles, words parted by one space; in this order."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def exact_match(answer: str, golden: Iterable[str]) -> bool:
    """Whether ``answer`` matches any of the golden answers."""
    given = normalise(answer)
    return any(given == normalise(one) for one in golden)


def holds_answer(text: str, golden: Iterable[str]) -> bool:
    """Whether any golden answer stands in ``text`` as whole words: what retrieval is measured by."""
    padded = f" {normalise(text)} "
    return any(f" {wanted} " in padded for one in golden if (wanted := normalise(one)))
