"""What set a prompt apart from those before it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from engine.service.prefix_misses import LOOKED_AT, MAX_PROMPTS, RecentPrompts

SYSTEM = "You are a helpful assistant. Answer in short sentences and cite the manual where you can, please. "
TOOLS = "Tools: search(query) looks something up, calculate(expression) computes it, mail(to, text) sends it away. "


def decode(tokens: Sequence[int]) -> str:
    return "".join(map(chr, tokens))


def why(*prompts: str, cached: int = 0, salts: Sequence[str] = (), block: int = 16) -> dict[str, Any]:
    """Of the last one. A token is a character."""
    recent = RecentPrompts()
    for i, prompt in enumerate(prompts):
        recent.add(f"r{i}", [*map(ord, prompt)], salts[i] if salts else "")
    found = recent.explain(f"r{len(prompts) - 1}", cached, block, decode)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("first", "second", "said"),
    [
        ("At 2026-11-24 09:15. ", "At 2026-11-24 10:02. ", "a number, date or time differs"),
        ("Request 9f3c-77aa. ", "Request 1b2d-40ee. ", "an id differs"),
        ("Dear Ann, ", "Dear Bob, ", "a short text differs"),
    ],
)
def test_a_place_that_changes_in_front_of_what_does_not_is_named(first: str, second: str, said: str) -> None:
    found = why(first + SYSTEM, second + SYSTEM)
    assert found["kind"] == "inserted"
    assert found["why"].startswith(said) and "put it at the end" in found["why"]
    assert found["first_difference"] == next(i for i, (a, b) in enumerate(zip(first, second)) if a != b)


def test_parts_in_another_order_are_named() -> None:
    found = why(SYSTEM + TOOLS, TOOLS + SYSTEM)
    place = f"stands at token {len(SYSTEM)} of the other prompt; keep one order"
    assert found["kind"] == "order"
    assert found["why"] == f"order: what begins at token 0 {place}"


def test_the_most_similar_prompt_is_the_one_compared_with() -> None:
    found = why("x" + TOOLS, SYSTEM + "What is a list?", "y" + TOOLS, SYSTEM + "When was it?", cached=96)
    assert found["nearest"] == "r1" and found["shared_tokens"] == len(SYSTEM) + 2
    assert found["kind"] == "differs"
    assert found["why"] == f"its content differs from token {len(SYSTEM) + 2} on"


def test_a_conversation_that_goes_on_is_no_miss() -> None:
    assert why(SYSTEM, SYSTEM + "More.", cached=96)["why"] == "it goes on where the other prompt ended"
    assert (
        why(SYSTEM, SYSTEM, cached=96)["why"]
        == "all its whole blocks were cached: 96 tokens; the rest is always computed"
    )


def test_a_prompt_shorter_than_a_block_is_never_cached() -> None:
    assert why("ab", "ab", cached=0)["why"].startswith("it has no whole block of ")


def test_a_prompt_that_was_cached_up_to_its_last_token_misses_nothing() -> None:
    assert why("ab", "ab", cached=1)["why"] == "all of it was cached but its last token, which is always computed"


def test_evictions_are_told_from_differences() -> None:
    assert why(SYSTEM, SYSTEM)["kind"] == "evicted"


def test_no_tenant_learns_of_the_prompts_of_another() -> None:
    assert set(why(SYSTEM, SYSTEM, salts=("a", "b"))) == {"kind", "why"}
    assert why(SYSTEM, TOOLS, SYSTEM, salts=("a", "b", "b"))["nearest"] == "r1"


def test_the_first_prompt_of_all_has_nothing_to_differ_from() -> None:
    assert why(SYSTEM) == {"kind": "first", "why": "no prompt of the same cache_salt came before it"}


def test_no_text_of_a_prompt_is_shown() -> None:
    found = str(why("Dear Ann, " + SYSTEM, "Dear Bob, " + SYSTEM))
    assert "Ann" not in found and "Bob" not in found and "helpful" not in found


def test_what_is_kept_is_bounded() -> None:
    recent = RecentPrompts(max_tokens=100)
    for i in range(50):
        recent.add(f"r{i}", range(30), "")
    assert recent.explain("r46", 0, 16, decode) is None and recent.explain("r49", 0, 16, decode) is not None
    for i in range(2 * MAX_PROMPTS):
        recent.add(f"short{i}", (), "")
    assert recent.explain("short0", 0, 16, decode) is None and len(recent._prompts) == MAX_PROMPTS
    recent.add("huge", range(1000), "")
    assert recent.explain("huge", 0, 16, decode) is None


def test_a_prompt_shares_its_beginning_with_the_last_ones_of_its_tenant() -> None:
    recent = RecentPrompts()
    recent.add("old", [1, 2, 3, 4], "a")
    for number in range(LOOKED_AT - 1):
        recent.add(f"{number}", [1, 9, number], "a")
    recent.add("another", [1, 2, 3, 4, 5], "b")
    assert [recent.shared([1, 2, 3, 7], salt) for salt in "abc"] == [1, 3, 0]


def test_a_breakpoint_is_reached_by_what_prompts_share_or_not() -> None:
    recent = RecentPrompts()
    for name, prompt in (("a", SYSTEM + "What?"), ("b", SYSTEM + "When?"), ("c", "x" + SYSTEM + "Who?")):
        ends = [prompt.index(SYSTEM) + len(SYSTEM), len(prompt)]
        recent.add(name, [*map(ord, prompt)], "", ends)
    recent.add("none", [*map(ord, SYSTEM)], "")
    found = [recent.explain(name, 0, 16, decode) or {} for name in ("b", "c", "none")]
    assert [each.get("breakpoint_shared") for each in found] == [True, False, None]
    assert found[0]["breakpoint"] == len(SYSTEM + "When?")
