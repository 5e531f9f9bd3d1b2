"""``MODEL_CARD.md`` of a trained drafter, with the numbers of its own run."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tools.train_drafter.acceptance import Counts, table
from tools.train_drafter.loop import Progress, Recipe
from torch import Tensor

TITLES = {"eagle3": "EAGLE3 head", "parallel_block": "Parallel-block head", "draft_model": "Draft model"}
ABOUT = {
    "eagle3": (
        "Proposes tokens from three of the target's hidden states (EAGLE-3, arXiv:2503.01840), in the checkpoint\n"
        "layout of SafeAILab and SpecForge. The embedding is the target's and not stored here."
    ),
    "parallel_block": (
        "Proposes a block of tokens in one pass from hidden states of the target, in the checkpoint layout of DFlash\n"
        "(z-lab, 2026) with a vocabulary projection of its own. The embedding is the target's and not stored here."
    ),
    "draft_model": (
        "A smaller Llama with the target's tokenizer, distilled from it (arXiv:1503.02531); it proposes tokens that\n"
        "the target verifies (arXiv:2211.17192)."
    ),
}
HOW = {
    "eagle3": (
        "Training-time test of {arguments.ttt_steps} steps: each step reads the head's own output of the step before.\n"
        "Soft cross entropy to the target's {arguments.choices} likeliest tokens in the draft vocabulary, where the\n"
        "target's first choice is in it; step i weighs 0.8^i. The vocabulary projection starts as the target's."
    ),
    "parallel_block": (
        "Blocks of {arguments.block_size} tokens begin at every token of an answer. Soft cross entropy of each mask\n"
        "to the target's {arguments.choices} likeliest tokens in the draft vocabulary, where the target's first\n"
        "choice is in it; mask i weighs 0.8^i. The vocabulary projection starts as the target's."
    ),
    "draft_model": (
        "Soft cross entropy to the target's {arguments.choices} likeliest tokens over the answers. Embeddings start\n"
        "as the principal components of the target's."
    ),
}
BUNDLED_PROMPTS = """ The prompts are those of `python -m tools.train_drafter.prompts`, from docstrings and source
text of Python's standard library (PSF License Agreement); most answers are greedy, some are sampled. Held out are:

* `entries`: documented names that training never asked about, so that their documentation was not seen either;
* `phrasing`: names that it did ask about, and whose documentation it saw, in words that it never used;
* `source`: beginnings within source files of which training saw nothing."""
CARD = """# {title} for {target}

{about}
It changes no token of the target, only how fast they come.

## Data

{answers:,} prompts, continued by the target itself. Acceptance is measured on {held_out:,} other prompts, which
training never saw.{prompts}

## Sizes

| | |
|---|---|
{sizes}
| parameters | {parameters:,} |
| weights | bfloat16, {megabytes:.2f} MB |

## Recipe

    {command}

{how}

AdamW (betas 0.9 and 0.95), gradient clipping at {recipe.clip:g}, peak learning rate {recipe.learning_rate:g} after
{recipe.warmup_steps} warm-up steps, cosine decay to 2% of the peak, at most {arguments.batch_tokens:,} tokens a step.

Measured on this run ({device}, {threads} thread(s), torch {torch}): {progress.step:,} steps, {passes:.1f}
passes, {progress.tokens:,} tokens (padding included) in {minutes:.1f} minutes of steps (wall clock, on cores shared
with other work), what the target computes for the first pass included.

## Held-out acceptance

Share of greedy drafts at each position of a chain that are accepted, given that those before them are, and tokens per
decode step of {steps} drafts (the target's own one included). The weights as stored, computed in float32.

{table}
"""


@dataclass(frozen=True, slots=True)
class Trained:
    """A run that is over."""

    kind: str
    config: Mapping[str, Any]
    progress: Progress
    passes: float
    recipe: Recipe
    arguments: argparse.Namespace
    acceptance: dict[str, Counts]
    answers: int
    held_out: int
    device: str


def write_card(out: Path, trained: Trained, tensors: Mapping[str, Tensor]) -> None:
    """``tensors``: those of the checkpoint."""
    weights = [tensor for tensor in tensors.values() if tensor.is_floating_point()]
    config, progress = trained.config, trained.progress
    keys = (
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
    )
    more = ("draft_vocab_size", "vocab_size", "block_size", "eagle_aux_hidden_state_layer_ids")
    norms = ("fc_norm", "norm_output")
    text = CARD.format(
        title=TITLES[trained.kind],
        target=Path(trained.arguments.model).name,
        about=ABOUT[trained.kind],
        how=HOW[trained.kind].format(arguments=trained.arguments),
        sizes="\n".join(f"| `{key}` | {config[key]} |" for key in (*keys, *more, *norms) if key in config),
        answers=trained.answers,
        held_out=trained.held_out,
        prompts=BUNDLED_PROMPTS if trained.arguments.model == "bundled" else "",
        device=trained.device,
        parameters=sum(tensor.numel() for tensor in weights),
        megabytes=(out / "model.safetensors").stat().st_size / 1e6,
        command=command(trained.arguments),
        arguments=trained.arguments,
        recipe=trained.recipe,
        progress=progress,
        passes=trained.passes,
        minutes=progress.seconds / 60,
        threads=torch.get_num_threads(),
        torch=torch.__version__,
        steps=max(counts.steps for counts in trained.acceptance.values()),
        table=table(trained.acceptance),
    )
    (out / "MODEL_CARD.md").write_text(text, encoding="utf-8")


def command(arguments: argparse.Namespace) -> str:
    """That trains this drafter again, without paths and what only divides a run into pieces."""
    words = ["python", "-m", "tools.train_drafter", arguments.kind, Path(arguments.model).name]
    left_out = {"kind", "model", "work", "out", "resume", "stop_after", "export_now", "save_every", "no_cache"}
    for name, value in vars(arguments).items():
        if name in left_out or value in (None, False, "auto") or isinstance(value, Path):
            continue
        values = value if isinstance(value, list) else [] if value is True else [value]
        words += [
            f"--{name.replace('_', '-')}",
            *(f"{each:g}" if isinstance(each, float) else str(each) for each in values),
        ]
    return shlex.join(words)
