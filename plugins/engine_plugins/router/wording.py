"""What a question says, as far as its words tell: what may not be compared at all, and the words that must be equal.

Two questions ask the same if they say the same content words in the same order, digits and negations among them. What
is left out is a short list: articles, *of*, forms of asking (:data:`FORMS`), the plural ``-s`` of words that are no
names, and the synonyms that somebody lists. All of it is English; words of other languages are compared as they are,
unless they are spelt like one of the list.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache


def words(text: str) -> frozenset[str]:
    return frozenset(text.split())


NEGATIONS = words("not no never without none nobody nothing neither nor")
FUNCTION_WORDS = frozenset({"a", "an", "the", "of", "'s"})
"""Say nothing of their own between content words that keep their order. Prepositions, pronouns and auxiliaries do: *is
the door open* and *does the door open* are two questions."""
ONE_FORM = {"does": "do", "are": "is", "am": "is"}
LETTERED = words("vitamin hepatitis influenza plan type class grade option group team level part section choice answer")
"""After these *a* is a letter."""
NUMBERS = {
    "two": "2", "three": "3", "four": "4", "five": "5", "six": "6", "seven": "7", "eight": "8", "nine": "9",
    "ten": "10", "eleven": "11", "twelve": "12",
}  # fmt: skip
ASKING = words("what who whom whose which when where why how is are am was were do does did can could")
"""A question begins with one of these, or ends with a question mark: ``a joke`` asks for one, ``a joke?`` what it
is."""
FORMS = tuple(
    (re.compile(pattern), to)
    for pattern, to in (
        (r"[`´‘’]", "'"),
        (r"\b(can|won|shan)'t\b|\bcannot\b", lambda m: {"won": "will", "shan": "shall"}.get(m[1], "can") + " not"),
        (r"n't\b", " not"),
        (r"\b(what|who|where|how|when|why|that|there|it|he|she)'s\b", r"\1 is"),
        (r"'re\b", " are"),
        (r"'ll\b", " will"),
        (r"'ve\b", " have"),
        (r"\bi'm\b", "i am"),
        (r"\bi'd (?=like|love|want)", "i would "),
        (r"^(?:(?:hi|hello|hey|excuse me|ok|okay)[,!.]\s*|(?:please|kindly)\b,?\s*)+", ""),
        (r"(?<=[,.!?])\s*(?:please|thanks|thank you|thx)[\s!.]*$|\s+please[\s!.]*$|(?<=,)\s*please(?=\?)", ""),
        (r"^(?:can|could|would|will) you (?:please )?(?=tell|explain|let me know|help)", ""),
        (r"^help me understand ", "explain "),
        (r"^(?:do you know|i (?:would like|want|need) to know|i wonder|let me know) (?=wh|how)", ""),
        (r"^(?:tell me|explain(?: to me)?) (?=wh|how)", ""),
        (r"^(?:tell me (?:more )?about|explain(?: to me)?) ", "what is "),
        (r"\b(?:is|are) there\b", "exist"),
        (r"\ba (few|little)\b", r"some \1"),
        (r"^(?:is it possible(?: for me)? to|am i able to) ", "can i "),
        (r"^(?:what is the way|how (?:do|can|does|could) (?:i|we|one|someone|somebody)|how) (?:to )?", "how "),
        (r"^where (?:can (?:i|we|one)|to) ", "where "),
    )
)  # fmt: skip
"""Forms of asking one thing, made one form, in this order."""
SAME_FORM = words(
    "news odds looks works customs arms goods means glasses damages contents savings manners minutes "
    "always perhaps besides sometimes afterwards mathematics physics economics politics series species lens "
    "his hers ours theirs yours"
)
"""Words whose final s is no plural's, or makes another word."""
REFERS = words(
    "again it its itself this that these those he him she they them former latter previous previously above below "
    "earlier instead else another same continue"
)
"""Say something only of what was said before. (*her* and *his* stay: somebody else's words.)"""
TODAY = words(
    "today tonight tomorrow yesterday now currently current latest recent recently nowadays "
    "monday tuesday wednesday thursday friday saturday sunday weekend week month year season ago"
)
"""The answer is another one soon."""
OF_WORDS = words(
    "translate rewrite rephrase paraphrase summarize summarise spell count correct proofread repeat reverse rhyme "
    "letter letters word words character characters sentence syllable syllables anagram"
)
"""The question is about words themselves, articles and all."""
MONTH = r"(?:jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec)[a-z]*\.?"
NEVER = (
    ("code or a quotation", re.compile(r"[`\"“”„«»{}\[\]<>=\\|\n\r\t]|(?<!\w)'|https?:|www\.")),
    ("an e-mail address", re.compile(r"@")),
    ("a long number", re.compile(r"\d(?:[\s().\-/]?\d){5,}")),
    (
        "a date or a time",
        re.compile(
            rf"\b\d{{1,4}}[./\-]\d{{1,2}}[./\-]\d{{1,4}}\b|\b{MONTH} \d|\b\d{{1,2}}(?:st|nd|rd|th)? (?:of )?{MONTH}\b"
            r"|\b\d{1,2}:\d\d|\b\d{1,2} ?[ap]\.?m\b"
        ),
    ),
    ("what is no text", re.compile(r"[\x00-\x1f\ud800-\udfff\ufffc\ufffd]")),
)
"""What a question may not have, by its name."""
_WHAT_IS = re.compile(r"^what (?:is|are) ")
_TOKEN = re.compile(r"\d+(?:[.,]\d+)*|[^\W\d_]+|'s\b|[^\s\w]|_")
_SILENT = frozenset(".,;:!?'()-–—…¿¡")
"""Signs that say nothing. Others, as in C++, 5 % or -5 € do."""
_MEANT = re.compile(r"(?<![^\W\d_])-\s?(?=\d)|(?<=\d)(?::(?=\d)|['!])|(?<!\S)\.(?=\w)")
"""Silent signs that do say something: minus, a ratio, a factorial, ``.net``."""
_LOUD = str.maketrans("-:'!.", "−∶′‼․")
REQUEST = "!"
"""In the place of a question mark where nothing is asked."""


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Words that somebody says mean the same, or nothing."""

    synonyms: Mapping[str, Sequence[str]]
    """For each word, others that mean it, of one word or several, in lower case."""
    ignored: frozenset[str] = frozenset()

    def one_word_each(self, text: str) -> str:
        for word, others in self.synonyms.items():
            for other in others:
                text = re.sub(rf"\b{re.escape(other)}\b", word, text)
        return text


NO_VOCABULARY = Vocabulary({})


def why_never(text: str, max_chars: int) -> str:
    """Why a question may not be answered as a similar one; empty if it may."""
    if len(text) > max_chars:
        return f"more than {max_chars} characters"
    lower = text.lower()
    for name, pattern in NEVER:
        if pattern.search(lower):
            return name
    said = {*re.findall(r"[^\W\d_]+", _in_one_form(text))}
    for why, listed in (("refers to what was said", REFERS), ("about today", TODAY), ("about words", OF_WORDS)):
        if found := said & listed:
            return f"{why}: {min(found)}"
    return ""


def content_words(text: str, vocabulary: Vocabulary = NO_VOCABULARY) -> tuple[str, ...]:
    """In order, digits and negations among them; empty if nothing is said."""
    names, acronyms = _names(text)
    found = list[str]()
    formed, before = _in_one_form(text), ""
    for token in _TOKEN.findall(vocabulary.one_word_each(_WHAT_IS.sub("", formed))):
        if token in acronyms or (token == "a" and before in LETTERED):
            found.append(token.upper())
        elif token not in FUNCTION_WORDS and token not in _SILENT and token not in vocabulary.ignored:
            word = NUMBERS.get(token) or ONE_FORM.get(token, token)
            found.append(word if token in names else singular(word))
        before = token
    return (*found, *([] if not found or _asks(formed) else [REQUEST]))


def singular(word: str) -> str:
    """Without the s of a plural, or of a verb after *he*, *she* and *it*."""
    if len(word) < 4 or not word.endswith("s") or word.endswith(("ss", "us", "is")) or word in SAME_FORM:
        return word
    if word.endswith("ies") and len(word) > 4:
        return f"{word[:-3]}y"
    return word[:-2] if word.endswith(("sses", "shes", "ches", "xes", "zzes")) else word[:-1]


def is_number(word: str) -> bool:
    return word[0].isdigit() or not word.isalpha()


@lru_cache(maxsize=64)
def _in_one_form(text: str) -> str:
    """In lower case, in one form of asking; *what is* stands before what is asked for."""
    found = " ".join(_MEANT.sub(lambda match: match[0].translate(_LOUD), text.lower()).split())
    for pattern, to in FORMS:
        found = pattern.sub(to, found)
    return found


def _asks(formed: str) -> bool:
    return formed.rstrip(" '\")").endswith("?") or formed.partition(" ")[0] in ASKING


def _names(text: str) -> tuple[set[str], set[str]]:
    """Words that are written like names, and like acronyms, in lower case. A text all in capitals has none."""
    words = re.findall(r"[^\W\d_]+", text)
    if text.isupper():
        return set(), set()
    acronyms = {word.lower() for word in words if len(word) > 1 and word.isupper()}
    acronyms |= {unit.lower() for unit in re.findall(r"\d\s?([A-Z])\b", text)}  # 5M are not 5m
    names = {word.lower() for word in words[1:] if word[:1].isupper()}
    return names, acronyms | (names & {"a"})  # vitamin A
