"""The requests of a run: seeded prompts of drawn lengths, with a part that all of them share."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

from engine_lab.bench.distribution import ONE, Distribution
from engine_lab.bench.pattern import POISSON, Pattern

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
class Turn:
    """What a client says after an answer, and how long it takes to."""

    prompt: str
    max_tokens: int
    think_s: float


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """One request to send: its prompt as text or as token ids, and how many tokens it asks for."""

    index: int
    prompt: str | tuple[int, ...]
    max_tokens: int
    service_class: str = ""
    """Of a mixture of classes, or as a trace names it; empty: there is one."""
    leave_after_s: float | None = None
    """When the client goes away, if the answer has not ended."""
    before: tuple[str, ...] = ()
    """What was said before the prompt: prompt, answer, prompt, answer, ..."""
    turns: tuple[Turn, ...] = ()
    """That follow in the same session, if the prompt is a text."""

    @property
    def whole(self) -> str | tuple[int, ...]:
        """The prompt with what was said before it."""
        return "".join(self.before) + self.prompt if isinstance(self.prompt, str) else self.prompt

    def answered(self, answer: str) -> BenchRequest:
        """The next turn."""
        assert isinstance(self.prompt, str), "token ids have no turns"
        turn, *rest = self.turns
        before = (*self.before, self.prompt, answer)
        return replace(self, prompt=turn.prompt, max_tokens=turn.max_tokens, before=before, turns=tuple(rest))


@dataclass(frozen=True, slots=True)
class Leave:
    """Clients that go away: a share of all, so many seconds after they have sent."""

    share: float
    after_s: float

    def __str__(self) -> str:
        return f"{self.share:g}@{self.after_s:g}"


def parse_leave(text: str) -> Leave:
    """``0.1@2``: a tenth of all after 2 s. Raises ``ValueError``."""
    try:
        share, after_s = (float(part) for part in text.split("@"))
    except ValueError:
        share, after_s = -1.0, 0.0
    if not (0 <= share <= 1 and 0 < after_s < math.inf):
        raise ValueError(f"{text!r}: expected SHARE@S, a share from 0 to 1 and seconds above 0, as in 0.1@2")
    return Leave(share, after_s)


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
    prefixes: int = 1
    """Shared parts: each prompt has one of them."""
    turns: Distribution = ONE
    """Of a session."""
    think_s: float = 0.0
    leave: Leave | None = None
    service_class: str = ""

    def requests(self, stream: str = "measured") -> Iterator[BenchRequest]:
        """Endless. Streams of different names have different prompts but the same shared parts."""
        rng = random.Random(f"{self.seed}/{stream}{self.service_class}")
        chance = random.Random(f"{self.seed}/{stream}{self.service_class}/sessions")
        shared = [self._shared(which) for which in range(self.prefixes)]
        for index in itertools.count():
            length = self.prompt_tokens.sample(rng)
            output = self.output_tokens.sample(rng)
            tag = f"{self.nonce} {stream}{self.service_class} {index}: "
            prompt = self._prompt(rng, shared[chance.randrange(self.prefixes)], length, tag)
            turns = tuple(self._turn(chance) for _ in range(self.turns.sample(chance) - 1))
            leaves = self.leave is not None and chance.random() < self.leave.share
            leave_after_s = self.leave.after_s if self.leave is not None and leaves else None
            yield BenchRequest(index, prompt, output, self.service_class, leave_after_s, turns=turns)

    def _shared(self, which: int) -> SharedPrefix:
        name = f"{self.service_class}{which or ''}"
        return SharedPrefix(self, random.Random(f"{self.seed}/shared{name}"), f"{self.nonce}{name} ")

    def _turn(self, rng: random.Random) -> Turn:
        chars = max(1, round(self.prompt_tokens.sample(rng) * self.chars_per_token))
        return Turn(self.passage(rng, chars), self.output_tokens.sample(rng), self.think_s)

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


def arrivals(rate: float, seed: int, pattern: Pattern = POISSON, ramp_s: float = 0.0) -> Iterator[float]:
    """Endless arrival times in seconds from the start, ``rate`` per second on average. Over the first ``ramp_s``
    seconds the rate grows evenly from 0."""
    rng = random.Random(f"{seed}/arrivals")
    come = 0.0
    """Since the start, in requests that come on average."""
    in_ramp = rate * ramp_s / 2
    for gap in pattern.gaps(rng):
        yield math.sqrt(2.0 * ramp_s * come / rate) if come < in_ramp else come / rate + ramp_s / 2
        come += gap
