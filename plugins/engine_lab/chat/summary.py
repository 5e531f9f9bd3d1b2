"""The speed of an answer, in a line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from engine_lab.chat.ask import Answer


def speed_so_far(answer: Answer, now_s: float) -> str:
    """While it comes."""
    said = answer.said
    if answer.ttft_s is None:
        return f"{now_s - answer.asked_s:.1f} s, no token yet; Ctrl-C stops"
    speed = answer.tokens_per_s
    return joined(
        counted(said.output_tokens, "token") if said.output_tokens else counted(len(said.chunks_s), "chunk"),
        f"{speed:.1f} tok/s" if speed else "",
        f"TTFT {1e3 * answer.ttft_s:.0f} ms",
        _prompt(answer),
        "Ctrl-C stops",
    )


def summary(answer: Answer, width: int) -> str:
    """When it has ended: as much as fits. Figures are the server's, or else those of this client."""
    said, timings = answer.said, answer.said.timings
    itl, drafted = timings.get("itl_ms") or {}, timings.get("drafted_tokens")
    speed = timings.get("predicted_per_second") or answer.tokens_per_s
    ttft_ms = timings.get("ttft_ms") or (None if answer.ttft_s is None else 1e3 * answer.ttft_s)
    parts = (
        "" if said.finish_reason else "stopped",
        "cut at max_tokens or the model's length" if said.finish_reason == "length" else "",
        counted(said.output_tokens, "token") if said.output_tokens else "",
        f"{speed:.1f} tok/s" if speed else "",
        f"TTFT {ttft_ms:.0f} ms" if ttft_ms is not None else "",
        _itl(itl) if itl.get("count") else "",
        f"drafts {100 * timings['accepted_tokens'] / drafted:.0f} %" if drafted else "",
        _prompt(answer),
    )
    return fitting(parts, width)


def _itl(itl: Mapping[str, float | None]) -> str:
    known = (f"{rank.upper()} {value:.1f}" for rank in ("p50", "p95") if (value := itl[rank]) is not None)
    return f"ITL {', '.join(known)} ms"


def _prompt(answer: Answer) -> str:
    said = answer.said
    if said.prompt_tokens is None:
        return ""
    return f"{said.prompt_tokens} prompt tokens, {said.cached_tokens or 0} cached"


def counted(count: int, what: str) -> str:
    return f"{count:,} {what}{'s' * (count != 1)}"


def joined(*parts: str) -> str:
    return " · ".join(filter(None, parts))


def fitting(parts: Sequence[str], width: int) -> str:
    """As many parts as fit, from the first on."""
    count = len(parts)
    while count > 1 and len(joined(*parts[:count])) > width:
        count -= 1
    return joined(*parts[:count])
