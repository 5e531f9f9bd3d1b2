"""Whether two answers say the same."""

from __future__ import annotations

import re
from collections import Counter

SHORT_WORDS = 5
"""Answers of no more words agree if they are equal."""
LEAST_F1 = 0.8
"""Longer ones agree from this F1 of their words on."""
_WORD = re.compile(r"\w+")


def words_of(text: str) -> list[str]:
    """In lower case, without punctuation."""
    return _WORD.findall(text.casefold())


def f1(text: str, other: str) -> float:
    """Harmonic mean of the share of each one's words that the other has, too, whatever their order (SQuAD,
    arXiv:1606.05250), 0 to 1. Two answers without words are equal: 1."""
    a, b = words_of(text), words_of(other)
    return 2 * (Counter(a) & Counter(b)).total() / (len(a) + len(b)) if a or b else 1.0


def agree(text: str, other: str) -> bool:
    """Short answers have the same words in the same order, longer ones :data:`LEAST_F1` of them."""
    a, b = words_of(text), words_of(other)
    return a == b or (max(len(a), len(b)) > SHORT_WORDS and f1(text, other) >= LEAST_F1)
