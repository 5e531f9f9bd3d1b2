"""Entry of ``engine eval``: options in, a judged table out."""

from __future__ import annotations

import gc
import math
import os
import shutil
from collections.abc import Sequence
from dataclasses import replace

import msgspec
from rich.console import Console

from engine.assembly.plan import EnginePlan
from engine.loop.environment import with_defaults
from engine.service.tokenizer import TokenizerError
from engine_lab.eval.material import Material, read_material
from engine_lab.eval.options import DEFAULT_REQUEST, EvalOptions
from engine_lab.eval.plans import Contestant, check_vocabulary, contestants, reference_of
from engine_lab.eval.progress import progress_bar
from engine_lab.eval.report import Report, Row, failures, render
from engine_lab.shared.errors import EvalError, EvalFailed, complain, explained
from engine_lab.shared.output import check_writable, write_json

OK, FAILED, USAGE = 0, 1, 2


def run(options: EvalOptions) -> int:
    """Run ``engine eval``; returns the exit status: 0 within the tolerances, 1 outside or broken, 2 wrong usage.

    Raises :class:`~engine.assembly.errors.AssemblyError`, which is wrong usage too.
    """
    try:
        if options.json_file is not None:
            check_writable(options.json_file, options.files)
        report = evaluate(options)
    except (EvalError, TokenizerError) as error:
        return complain("eval", error, USAGE)
    except EvalFailed as error:
        return complain("eval", error, FAILED)
    Console(width=shutil.get_terminal_size((120, 24)).columns).print(render(report))
    outside = failures(report)
    if options.json_file is not None:
        try:
            write_json(options.json_file, msgspec.to_builtins(report) | {"outside": outside})
        except OSError as error:
            return complain("eval", f"--json {options.json_file}: {error.strerror or error}", FAILED)
    return FAILED if outside else OK


def evaluate(options: EvalOptions) -> Report:
    """Everything that was asked for.

    Raises :class:`EvalError`, :class:`TokenizerError` and :class:`~engine.assembly.errors.AssemblyError` for what makes
    no sense, and :class:`EvalFailed` for plans that cannot compute.
    """
    plans = contestants(options)
    first = plans[0].plan
    os.environ.update(with_defaults(os.environ, first.device.kind))  # before torch, which reads it, is imported
    memory = options.memory or first.device.memory_bytes
    tokens = options.requests_of or min(DEFAULT_REQUEST, first.model.max_position)
    if options.capacity_only:
        rows = [_row(one, memory, tokens, stated=options.cuda_capability is not None) for one in plans]
        return _report(options, first, "capacity, from shapes alone", rows, memory, tokens)
    reference = reference_of(options)
    for one in plans:
        check_vocabulary(reference.plan, one.plan)
    material = read_material(options, reference.plan, [one.plan for one in plans])
    rows = [_row(one, memory, tokens) for one in (reference, *plans)]
    rows[0] = replace(rows[0], is_reference=True)
    if material.windows:
        rows = _scored(options, [reference, *plans], rows, material)
    if material.questions:
        rows = _asked(options, [reference, *plans], rows, material)
    return _report(options, first, material.source, rows, memory, tokens)


def _report(
    options: EvalOptions, plan: EnginePlan, source: str, rows: Sequence[Row], memory: int, tokens: int
) -> Report:
    fraction = plan.settings.memory.fraction
    scored = next((f"{row.tokens:,} tokens scored" for row in rows if row.tokens is not None), None)
    windows = f"windows of {options.context} tokens, {options.stride} apart, {options.chunk} in a forward pass"
    return Report(
        model=plan.model.name,
        source=source if scored is None else f"{source}; {scored} in {windows}",
        settings={"context": options.context, "stride": options.stride, "chunk": options.chunk},
        request_tokens=tokens,
        memory_bytes=memory,
        memory_fraction=fraction,
        rows=tuple(rows),
        limits=options.limits,
        notes=(
            f"requests: most of {tokens} tokens at once in memory.fraction={fraction:g} of {memory / 2**30:.4g} GiB "
            f"({plan.device.kind}, execution={plan.execution}), by the ledger that serving starts with",
        ),
    )


def _row(one: Contestant, memory: int, tokens: int, stated: bool = False) -> Row:
    """``stated``: for a device that is not here."""
    from engine.assembly.bind import bind
    from engine_lab.shared.capacity import capacity_of
    from engine_lab.shared.stated import bind_stated

    with explained():
        found = capacity_of(one.plan, (bind_stated if stated else bind)(one.plan), memory, tokens)
    return Row(
        label=one.label,
        overrides=one.overrides,
        slots={slot: choices[0].name for slot, choices in one.plan.slots.items() if len(choices) == 1},
        dtype=one.plan.dtype,
        weights_bytes=found.weights,
        kv_bytes_per_token=found.kv_per_token,
        requests=found.requests,
        beside_bytes=found.beside,
    )


def _scored(options: EvalOptions, plans: Sequence[Contestant], rows: Sequence[Row], material: Material) -> list[Row]:
    """``rows`` with perplexity, KL and agreement; the reference is the first."""
    from engine.assembly.bind import bind
    from engine_lab.eval.forward import LoadedPlan
    from engine_lab.eval.scoring import score_windows

    _check_fits(plans[0].plan, rows)
    loaded = []
    with progress_bar("load", len(plans)) as done, explained():
        for one in plans:
            loaded.append(LoadedPlan(one.plan, bind(one.plan), options.context, options.chunk, one.label))
            done()
    with progress_bar("windows", len(material.windows)) as done, explained():
        own, scores = score_windows(loaded[0], loaded[1:], material.windows, done)
    del loaded
    gc.collect()
    base = own.perplexity
    if not math.isfinite(base):
        raise EvalFailed(
            f"the reference ({plans[0].label}, {plans[0].plan.dtype}) does not predict this text at all: its "
            "perplexity is infinite, so nothing can be compared with it. Try --reference-dtype float32 or another text"
        )
    return [
        replace(rows[0], tokens=own.tokens, perplexity=base),
        *(
            replace(
                row,
                tokens=score.tokens,
                perplexity=score.perplexity,
                perplexity_increase=score.perplexity / base - 1.0,
                kl=score.mean_kl,
                agreement=score.agreement,
            )
            for row, score in zip(rows[1:], scores, strict=True)
        ),
    ]


def _check_fits(plan: EnginePlan, rows: Sequence[Row]) -> None:
    """Plans are compared window by window, so all weights are in memory at once."""
    from engine.startup.memory.budget import free_memory
    from engine.startup.memory.report import size

    together, free = sum(row.weights_bytes for row in rows), free_memory(plan.device)
    if together > free:
        raise EvalError(
            f"the reference and {len(rows) - 1} plans take {size(together)} together and {size(free)} are free: "
            "compare fewer plans at once, or run it with device=cpu"
        )


def _asked(options: EvalOptions, plans: Sequence[Contestant], rows: Sequence[Row], material: Material) -> list[Row]:
    """``rows`` with the share of questions that were answered as expected."""
    from engine_lab.eval.questions import ask

    found = []
    with progress_bar("questions", len(plans)) as done, explained():
        for one, row in zip(plans, rows, strict=True):
            answers = ask(one, material.questions, material.match, options.answer_tokens, options.config_dirs)
            found.append(replace(row, exact=answers.share, questions=answers.total))
            gc.collect()  # the next engine takes the memory of this one
            done()
    return found
