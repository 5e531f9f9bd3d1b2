"""Entry of ``engine eval --drafter``: options in, judged tables out."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from itertools import zip_longest

import msgspec
from rich.console import Console

from engine.service.tokenizer import TokenizerError
from engine_lab.eval.drafting.figures import drafted_figures, plain_figures
from engine_lab.eval.drafting.options import DraftingOptions
from engine_lab.eval.drafting.plans import Setting, pool_override, settings_of
from engine_lab.eval.drafting.prompts import Prompt, read_prompts
from engine_lab.eval.drafting.report import Difference, Report, Row, failures, render
from engine_lab.eval.drafting.turns import contenders, groups_of, take_turns
from engine_lab.eval.drafting.worker import Run
from engine_lab.eval.progress import progress_bar
from engine_lab.shared.errors import EvalError, EvalFailed, complain
from engine_lab.shared.output import check_writable, write_json

OK, FAILED, USAGE = 0, 1, 2


def run(options: DraftingOptions) -> int:
    """Run ``engine eval --drafter``; returns the exit status: 0 when all is as it must be, 1 when an output differs, a
    drafter is slower than allowed or an engine broke, 2 wrong usage.

    Raises :class:`~engine.assembly.errors.AssemblyError`, which is wrong usage too.
    """
    try:
        if options.json_file is not None:
            check_writable(options.json_file, [options.prompts])
        report = compare(options)
    except (EvalError, TokenizerError) as error:
        return complain("eval", error, USAGE)
    except EvalFailed as error:
        return complain("eval", error, FAILED)
    Console(width=shutil.get_terminal_size((120, 24)).columns).print(render(report))
    wrong = failures(report)
    if options.json_file is not None:
        try:
            write_json(options.json_file, msgspec.to_builtins(report) | {"wrong": wrong})
        except OSError as error:
            return complain("eval", f"--json {options.json_file}: {error.strerror or error}", FAILED)
    return FAILED if wrong else OK


def compare(options: DraftingOptions) -> Report:
    """Everything that was asked for.

    Raises :class:`EvalError`, :class:`TokenizerError` and :class:`~engine.assembly.errors.AssemblyError` for what makes
    no sense, and :class:`EvalFailed` for engines that break.
    """
    settings = settings_of(options)
    prompts = read_prompts(options.prompts, settings[0], options.batches)
    pool = pool_override(options, settings, max(len(prompt.tokens) for prompt in prompts))
    rows: list[Row] = []
    differences: list[Difference] = []
    compared = 0
    with (
        progress_bar("start engines", len(settings)) as started,
        contenders(options, settings, pool, started) as engines,
    ):
        for batch in options.batches:
            asked = [prompt for group in groups_of(prompts, batch) for prompt in group]
            with progress_bar(f"batch {batch}", options.pairs) as done:
                runs = take_turns(engines, prompts, batch, options.pairs, done)
            rows += _rows(settings, batch, runs)
            compared += len(asked) * options.pairs * (len(settings) - 1)
            for setting, own in zip(settings[1:], runs[1:], strict=True):
                differences += differences_of(setting.label, batch, asked, own, runs[0])
    plan = settings[0].plan
    return Report(
        model=plan.model.name,
        dtype=plan.dtype,
        prompts=options.prompts,
        asked={str(batch): len(prompts) // batch * batch for batch in options.batches},
        pairs=options.pairs,
        answer_tokens=options.answer_tokens,
        max_slowdown=options.max_slowdown,
        rows=tuple(rows),
        compared=compared,
        differences=tuple(differences),
    )


def _rows(settings: Sequence[Setting], batch: int, runs: Sequence[Sequence[Run]]) -> list[Row]:
    try:
        figures = [plain_figures(runs[0]), *(drafted_figures(own, runs[0]) for own in runs[1:])]
    except ValueError as error:
        raise EvalError(f"--batch {batch}: {error}, so there is no decoding to time; ask for longer answers") from error
    return [Row(one.label, one.overrides, batch, found) for one, found in zip(settings, figures, strict=True)]


def differences_of(
    label: str, batch: int, prompts: Sequence[Prompt], own: Sequence[Run], plain: Sequence[Run]
) -> list[Difference]:
    """Answers that are not those of the same pass without drafts."""
    found = []
    for run, reference in zip(own, plain, strict=True):
        for prompt, got, wanted in zip(prompts, run.outputs, reference.outputs, strict=True):
            if got != wanted:
                pairs = enumerate(zip_longest(wanted, got))
                at, (first, other) = next((i, pair) for i, pair in pairs if pair[0] != pair[1])
                found.append(Difference(label, batch, prompt.text, at, first, other))
    return found
