"""What is asked of an engine once: what the baseline is, and what each rung answers."""

from __future__ import annotations

from itertools import accumulate, islice
from typing import Any

import aiohttp

from engine_lab.bench.probe import ProbeError, post
from engine_lab.ladder.record import Baseline, Output
from engine_lab.ladder.requests import Requests
from engine_lab.ladder.rungs import Form

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def baseline_of(answer: dict[str, Any]) -> Baseline:
    """What ``/engine/plan`` says of the baseline's engine."""
    plan = answer["plan"]
    vocabulary = (
        plan["model"]["vocab_size"] * plan["model"]["hidden_size"] * (1 if plan["model"]["tie_embeddings"] else 2)
    )
    is_plain = plan["model"]["quantization"] is None and plan["slots"]["quantizer"][0]["name"] in ("checkpoint", "none")
    size = DTYPE_BYTES.get(plan["dtype"])
    return Baseline(
        plan["device"]["name"],
        plan["device"]["kind"],
        plan["dtype"],
        answer["engine"]["weights_bytes"] / size - vocabulary if is_plain and size else None,
    )


async def outputs_of(
    session: aiohttp.ClientSession, requests: Requests, url: str, form: Form, seed: int, count: int
) -> list[Output]:
    """Greedy answers to ``count`` prompts, one at a time. Raises :class:`ProbeError`."""
    found = []
    target = requests.target(url, form, "outputs")
    for request in islice(requests.prompts(form, seed), count):
        body = target.body(request, stream=False)
        plain = await post(session, target.url, target, body)
        # Again with the margins: they may not be there for drafted tokens, so the text is not taken from this one.
        more = {"logprobs": True, "top_logprobs": 2} if target.endpoint == "chat" else {"logprobs": 2}
        told = await post(session, target.url, target, body | more)
        if not plain.get("choices") or not told.get("choices"):
            raise ProbeError(
                f"{target.url} gave no answer to a prompt of {len(request.prompt)} characters or ids; "
                "engine bench with the same flags says why"
            )
        tokens, margins = _margins(told["choices"][0].get("logprobs") or {})
        found.append(Output(_text(plain["choices"][0]), tokens, margins))
    return found


def _text(choice: dict[str, Any]) -> str:
    return str(choice["text"] if "text" in choice else choice["message"]["content"] or "")


def _margins(logprobs: dict[str, Any]) -> tuple[list[str], list[float]]:
    """Tokens, and by how much each was likelier than the next; of either endpoint's form."""
    if "content" in logprobs:
        entries = logprobs["content"] or []
        tokens = [entry["token"] for entry in entries]
        tops = [[one["logprob"] for one in entry["top_logprobs"]] for entry in entries]
    else:
        tokens = logprobs.get("tokens") or []
        tops = [list(top.values()) for top in logprobs.get("top_logprobs") or []]
    ordered = [sorted(top, reverse=True) for top in tops]
    return tokens, [top[0] - top[1] if len(top) > 1 else 0.0 for top in ordered]


def divergence(before: Output, after: Output, may_be_cut: bool) -> tuple[int, float | None] | None:
    """The first token of ``before`` that ``after`` does not repeat, and its margin in nats (``None``: not known).

    ``may_be_cut``: one of them had a lower limit of tokens, so that it may end before the other does.
    """
    if before.text == after.text:
        return None
    shorter = min(len(before.text), len(after.text))
    same = next((i for i in range(shorter) if before.text[i] != after.text[i]), shorter)
    if may_be_cut and same == shorter:
        return None
    ends = list(accumulate(len(token) for token in before.tokens))
    position = next((i for i, end in enumerate(ends) if end > same), len(ends))
    return position, before.margins[position] if position < len(before.margins) else None
