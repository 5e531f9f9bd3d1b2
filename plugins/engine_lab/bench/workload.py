"""The requests of a run: seeded prompts of drawn lengths, with a part that all of them share."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from engine_lab.bench.distribution import Distribution

_VOCABULARY = """
about after again along also always among answer around because before below between both bring build call change
city clear close cold common could country course cover cross different does door down early earth enough even every
example face family far father feel few field find fire first five follow food form found four friend from full gave
give good govern great green ground group grow half hand happen hard head hear help here high hold home horse hour
house hundred idea inch into keep kind king know land large last late laugh lead learn leave letter life light like
line list listen live long look made main make many mark mean measure might mile mind money moon morning most mother
mountain move much music name near never next night north note nothing notice number often once only open order
other over page paper part pass pattern people perhaps person picture piece place plain plan plant play point port
pose press problem product pull question quick rain reach read
"""
WORDS = _VOCABULARY.split()


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """One request to send: its prompt as text or as token ids, and how many tokens it asks for."""

    index: int
    prompt: str | tuple[int, ...]
    max_tokens: int
    service_class: str = ""
    """Of a mixture of classes, or as a trace names it; empty: there is one."""


@dataclass(frozen=True, slots=True)
class Workload:
    """How prompts are made.

    The same seed gives the same lengths and the same texts. ``nonce`` goes into every prompt, so that a
    second run does not find the first one's prompts in the server's prefix cache.
    """

    prompt_tokens: Distribution
    output_tokens: Distribution
    shared_prefix: float
    """Share of each prompt, 0 to 1, that it has in common with all others."""
    chars_per_token: float
    nonce: str
    seed: int
    text: str
    """Prompts are cut from this text (:func:`random_text` makes one)."""
    vocab_size: int | None = None
    """Prompts are random token ids below this; ``None``: prompts are text."""

    def requests(self, stream: str = "measured") -> Iterator[BenchRequest]:
        """Endless. Streams of different names have different prompts but the same shared part."""
        rng = random.Random(f"{self.seed}/{stream}")
        shared_rng = random.Random(f"{self.seed}/shared")
        shared = SharedPrefix(self, shared_rng, f"{self.nonce} ")
        index = 0
        while True:
            length = self.prompt_tokens.sample(rng)
            output = self.output_tokens.sample(rng)
            tag = f"{self.nonce} {stream} {index}: "
            prompt = self._prompt(rng, shared, length, tag)
            yield BenchRequest(index, prompt, output)
            index += 1

    def _prompt(self, rng: random.Random, shared: SharedPrefix, length: int, tag: str) -> str | tuple[int, ...]:
        if self.vocab_size is not None:
            num_shared = round(length * self.shared_prefix)
            # Seeded by the tag, not by rng alone, for the nonce to count.
            own = random.Random(f"{self.seed}/{tag}")
            ids = (*shared.ids(num_shared), *random_ids(own, length - num_shared, self.vocab_size))
            return tuple(ids)
        chars = max(1, round(length * self.chars_per_token))
        num_shared = round(chars * self.shared_prefix)
        own_text = "" if num_shared == chars else tag + self.passage(rng, chars)
        return shared.chars(num_shared) + own_text[: chars - num_shared]

    def passage(self, rng: random.Random, chars: int) -> str:
        """``chars`` characters from a random place of the text (which starts over when it is too short)."""
        start = rng.randrange(len(self.text))
        found = self.text[start : start + chars]
        while len(found) < chars:
            found += self.text[: chars - len(found)]
        return found

    def words(self, rng: random.Random, chars: int) -> str:
        """Whole words and a space, ``chars`` characters on average."""
        found = self.passage(rng, chars + 16)
        found = found[found.find(" ") + 1 :][: chars + 3]
        return found[: found.rfind(" ") + 1] or found[:chars]


class SharedPrefix:
    """The common beginning of all prompts, grown to the longest that was needed."""

    def __init__(self, workload: Workload, rng: random.Random, head: str) -> None:
        self._workload, self._rng = workload, rng
        self._text = head
        self._ids: list[int] = []
        self._id_rng = random.Random(f"{workload.seed}/{head}/ids")

    def chars(self, count: int) -> str:
        if len(self._text) < count:
            self._text += self._workload.passage(self._rng, max(4096, count - len(self._text)))
        return self._text[:count]

    def ids(self, count: int) -> list[int]:
        if len(self._ids) < count:
            assert self._workload.vocab_size is not None
            self._ids += random_ids(self._id_rng, count - len(self._ids), self._workload.vocab_size)
        return self._ids[:count]


def random_ids(rng: random.Random, count: int, vocab_size: int) -> list[int]:
    """Ids from the upper part of the vocabulary: the lowest ones are often special tokens."""
    low = min(256, vocab_size // 2)
    return rng.choices(range(low, vocab_size), k=count)


def random_text(seed: int, num_words: int = 100_000) -> str:
    """Random English words. Made once, so that taking a prompt from it costs next to nothing during the
    run."""
    return " ".join(random.Random(f"{seed}/words").choices(WORDS, k=num_words))


def arrivals(rate: float, seed: int) -> Iterator[float]:
    """Endless arrival times in seconds from the start, of a Poisson process with ``rate`` per second."""
    rng = random.Random(f"{seed}/arrivals")
    now = 0.0
    while True:
        yield now
        now += rng.expovariate(rate)
