"""The page of a plan, for a terminal and as JSON."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from engine.contracts.percentiles import TOO_FEW
from engine_lab.plan.figure import Figure
from engine_lab.plan.planning import Answer, Option
from engine_lab.plan.predict import GOOD_SHARE, HEADROOM, Prediction

SCHEMA = "engine-plan/1"
GIB = 2**30


def render(answer: Answer) -> RenderableType:
    """Everything on one page: does it fit, how fast, at what price, what to change."""
    parts: list[RenderableType] = [_verdict(answer), _memory(answer)]
    if answer.prediction is not None:
        parts += [_latency(answer, answer.prediction), _rates(answer, answer.prediction)]
    if answer.fixes:
        parts += _options("what makes it fit (simulated, steps estimated)", answer, answer.fixes)
    if answer.options:
        parts += _options("worth a try, best first (simulated, steps estimated)", answer, answer.options)
    if answer.layouts:
        parts += _options("the same on several devices (simulated, steps estimated)", answer, answer.layouts)
    parts.append(Text("\n".join(_notes(answer)), style="dim"))
    return Group(*parts)


def _verdict(answer: Answer) -> Text:
    if not answer.sizing.blocks:
        return Text(f"does not fit. {answer.sizing.refusal}", style="bold red")
    slo, prediction = answer.question.slo, answer.prediction
    fits = f"{answer.sizing.plan.model.name} fits {answer.device}: {answer.sizing.plan.layout.size} device(s)"
    if slo is None or prediction is None or prediction.good_share is None:
        return Text(fits, style="bold green")
    kept = prediction.good_share >= GOOD_SHARE
    text = f"{fits}, and {prediction.good_share:.0%} of requests keep {slo}"
    return Text(text if kept else f"{text}: less than {GOOD_SHARE:.0%}", style="bold green" if kept else "bold yellow")


def _memory(answer: Answer) -> Table:
    sizing = answer.sizing
    table = _table("memory of a device (estimated, by the code that serving starts with)", "", "GiB")
    for name, num_bytes in sizing.ledger.items():
        if num_bytes:
            table.add_row(name, f"{num_bytes / GIB:.2f}")
    budget, fraction = sizing.budget, sizing.budget.fraction
    table.add_row("left", f"{(budget.usable - sum(sizing.ledger.values())) / GIB:.2f}")
    table.add_row(f"may be used: memory.fraction={fraction:g} of {budget.free / GIB:.2f}", f"{budget.usable / GIB:.2f}")
    table.add_section()
    table.add_row("KV cache of a token, KiB", f"{sizing.kv_per_token / 1024:.1f}")
    table.add_row("tokens in the KV pool", f"{sizing.kv_tokens:,}")
    for name, count in sizing.forgetful_tokens.items():
        table.add_row(f"tokens of {name} in it", f"{count:,}")
    shared = f", {answer.shared_tokens} of them shared" if answer.shared_tokens else ""
    tokens = f"{answer.request_tokens} tokens{shared}"
    rows = sizing.plan.scheduler.max_requests
    table.add_row(f"requests of {tokens} at once, by memory, with as many rows", f"{_by_memory(answer):,}")
    table.add_row(f"the same, with scheduler.max_requests={rows}", f"{_concurrency(answer):,}")
    return table


def _by_memory(answer: Answer) -> int:
    return answer.sizing.by_memory(answer.request_tokens, answer.shared_tokens)


def _concurrency(answer: Answer) -> int:
    return answer.sizing.concurrency(answer.request_tokens, answer.shared_tokens)


def _latency(answer: Answer, found: Prediction) -> Table:
    table = _table(f"latency, ms (simulated, with steps as {answer.cost.origin})", "", "P50", "P95", "P99")
    for name, row in (("TTFT", found.ttft_ms), ("ITL", found.itl_ms), ("E2E", found.e2e_ms)):
        table.add_row(name, *(show(row[key]) for key in ("p50", "p95", "p99")))
    return table


def _rates(answer: Answer, found: Prediction) -> Table:
    table = _table("load and price", "", "", "from")
    limits = f" that keep {answer.question.slo}" if answer.question.slo is not None else ""
    rows = (
        ("output tokens/s", Figure(found.output_tokens_per_s, "simulated")),
        ("device busy, share", Figure(found.utilisation, "simulated")),
        ("most requests at once", Figure(float(found.most_running), "simulated")),
        ("KV pool used, at most", Figure(found.most_kv_used, "simulated")),
        ("requests refused as too long", Figure(float(found.refused), "simulated")),
        ("prompt tokens from the prefix cache, share", Figure(found.cached_share, "simulated")),
        (f"most requests/s{limits}", answer.most_rate),
        (f"replicas for this rate, with {HEADROOM - 1:.0%} to spare", answer.replicas),
        ("USD per hour of a device", answer.usd_per_hour),
        ("USD per million output tokens at this rate", answer.usd_per_million),
    )
    for name, figure in rows:
        table.add_row(name, show(figure.value), figure.origin)
    return table


def _options(title: str, answer: Answer, options: tuple[Option, ...]) -> Iterator[RenderableType]:
    columns = ("add", "E2E faster", "TTFT P95", "ITL P50", "at once", "USD/M", "keep SLO")
    table = _table(title, *(columns if answer.question.slo is not None else columns[:-1]))
    for option in options:
        found = option.prediction
        if found is None:
            cells = ["-"] * 5
        else:
            gain = "it fits" if option.gain == float("inf") else f"{option.gain:.2f} x"
            cells = [gain, show(found.ttft_ms["p95"]), show(found.itl_ms["p50"]), f"{option.concurrency:,}"]
            cells.append(show(option.usd_per_million.value))
        if answer.question.slo is not None:
            cells.append("-" if found is None or found.good_share is None else f"{found.good_share:.0%}")
        table.add_row(" ".join(option.overrides), *cells)
    yield table
    for option in options:
        text = f"not possible: {option.reason}" if option.reason else option.trade
        yield Text(f"  {' '.join(option.overrides)}: {text}", style="dim")


def _notes(answer: Answer) -> Iterator[str]:
    question, card = answer.question, answer.question.card
    count = len(question.trace)
    yield f"load: {question.load or 'the trace'}, {count} requests, seed {question.seed}"
    yield steps_of(answer)
    if (replicas := answer.sizing.plan.settings.fleet.replicas) > 1:
        yield f"fleet.replicas={replicas}: figures are of one engine, and the load is what that one gets"
    if answer.prediction is not None and None in answer.prediction.ttft_ms.values():
        yield TOO_FEW
    if answer.no_options:
        yield answer.no_options
    drafter = answer.sizing.plan.choice("drafter").name
    if answer.sizing.drafting is not None:
        drafts = answer.cost.drafts
        if drafts is None or not drafts.acceptance:
            yield f"drafter={drafter}: its drafts are left out, for it is not known how many are accepted"
        else:
            yield f"drafter={drafter}: {drafts.acceptance[0]:.0%} of first drafts accepted, as measured with the steps"
    if answer.cost.origin == "estimated":
        yield "tokenizer, HTTP and network are not in it; estimates rank better than they predict"
    if card is not None:
        recalled = f"; from memory, so verify: {', '.join(card.recalled)}" if card.recalled else ""
        price = f"; seen from {card.usd_range[0]:g} to {card.usd_range[1]:g} USD/h" if card.usd_range else ""
        yield f"{card.name}: table of {card.as_of}{price}{recalled}"
    if question.load is not None:
        yield f"check it: {question.load.bench(count, question.seed)}"


def steps_of(answer: Answer) -> str:
    """Where the times of steps are from."""
    return f"steps: {answer.cost.origin}: {answer.cost.source}"


def document(answer: Answer) -> dict[str, Any]:
    """The page as JSON: every figure with where it is from."""
    sizing, question = answer.sizing, answer.question
    return {
        "schema": SCHEMA,
        "model": sizing.plan.model.name,
        "device": answer.device,
        "devices": sizing.plan.layout.size,
        "overrides": question.overrides,
        "fits": bool(sizing.blocks),
        "why_not": sizing.refusal,
        "memory_bytes": {
            **{name: Figure(num_bytes, "estimated") for name, num_bytes in sizing.ledger.items()},
            "usable": Figure(sizing.budget.usable, "estimated"),
            "kv_per_token": Figure(sizing.kv_per_token, "estimated"),
        },
        "kv_tokens": Figure(sizing.kv_tokens, "estimated"),
        "kv_group_tokens": {name: Figure(count, "estimated") for name, count in sizing.forgetful_tokens.items()},
        "request_tokens": answer.request_tokens,
        "shared_tokens": answer.shared_tokens,
        "requests_by_memory": Figure(_by_memory(answer), "estimated"),
        "requests_at_once": Figure(_concurrency(answer), "estimated"),
        "load": None if question.load is None else str(question.load),
        "slo": None if question.slo is None else str(question.slo),
        "num_requests": len(question.trace),
        "seed": question.seed,
        "steps": {"origin": answer.cost.origin, "source": answer.cost.source, "cost": answer.cost.step},
        "prediction": None if answer.prediction is None else _told(answer.prediction),
        "most_rate": answer.most_rate,
        "replicas": answer.replicas,
        "usd_per_hour": answer.usd_per_hour,
        "usd_per_million": answer.usd_per_million,
        "fixes": [_option(option) for option in answer.fixes],
        "options": [_option(option) for option in answer.options],
        "layouts": [_option(option) for option in answer.layouts],
        "notes": list(_notes(answer)),
    }


def _told(found: Prediction) -> dict[str, Any]:
    return {"origin": "simulated", **msgspec.to_builtins(found)}


def _option(option: Option) -> dict[str, Any]:
    """Gains that are infinite, as where only the option fits, are ``null`` as unknown ones are: ``fits`` tells."""
    fits, gain = option.prediction is not None, option.gain
    return {
        **msgspec.to_builtins(option),
        "fits": fits,
        "gain": Figure.of(None if gain == float("inf") else gain, "simulated"),
        "prediction": None if option.prediction is None else _told(option.prediction),
    }


def _table(title: str, *columns: str) -> Table:
    """Figures are never cut: what names them is folded where a terminal is narrow."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for number, column in enumerate(columns):
        names = number == 0 or column == "from"
        table.add_column(column, justify="left" if names else "right", no_wrap=number > 0, overflow="fold")
    return table


def show(value: float | None) -> str:
    if value is None:
        return "-"
    if abs(value) >= 100 or value == int(value):
        return f"{value:,.0f}"
    return f"{value:.3g}" if abs(value) >= 1e-4 else f"{value:.6f}".rstrip("0")
