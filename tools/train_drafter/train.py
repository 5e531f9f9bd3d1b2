"""From answers to a drafter that can be served: train, measure on held-out prompts, write checkpoint and model card."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tools.train_drafter import chains, draft_model, eagle3, parallel_block
from tools.train_drafter.acceptance import Matches, measure, table
from tools.train_drafter.answers import Answered, read_answers
from tools.train_drafter.card import Trained, write_card
from tools.train_drafter.draft_model import DraftModel, DraftModelSizes
from tools.train_drafter.eagle3 import Eagle3, Eagle3Sizes
from tools.train_drafter.features import Features, token_counts
from tools.train_drafter.loop import Loss, Recipe, Trainer
from tools.train_drafter.parallel_block import BlockSizes, ParallelBlock
from tools.train_drafter.target import Target
from torch import Tensor, nn

from engine.contracts.graph import Graph
from engine.contracts.ops import Gated, Norm, Rope, RopeFacts
from engine_lab.shared.output import check_folder

MEASURED_STEPS = 7
"""Drafts of a decode step that acceptance is reported for, where the drafter has no bound of its own."""


@dataclass(frozen=True, slots=True)
class Drafter:
    """A kind of drafter, ready to be trained for one target."""

    kind: str
    module: nn.Module
    loss: Loss
    matches: Matches
    config: dict[str, Any]
    tensors: Callable[[], Mapping[str, Tensor]]
    aux_layers: tuple[int, ...]
    steps: int = MEASURED_STEPS
    """Drafts of a decode step."""


def train(arguments: argparse.Namespace) -> str:
    """Do what the command line says; returns what happened. Raises ``ValueError`` for what cannot be done."""
    check_folder(arguments.out, "--out")
    torch.manual_seed(arguments.seed)
    target = Target(arguments.model, arguments.device, arguments.dtype)
    answers, held_out = read_answers(arguments.answers), read_answers(arguments.held_out)
    drafter = MAKERS[arguments.kind](arguments, target, answers)
    batches = (arguments.batch_tokens, arguments.choices)
    keep = None if arguments.no_cache else arguments.features or arguments.work / "features"
    features = Features(target, answers, drafter.aux_layers, *batches, None if keep is None else keep / "train")
    recipe = Recipe(
        arguments.learning_rate,
        arguments.warmup_steps,
        arguments.steps,
        arguments.minutes,
        arguments.clip,
        arguments.seed,
    )
    trainer = Trainer(drafter.module, drafter.loss, features, recipe, arguments.work)
    if arguments.resume and trainer.resume():
        print(f"resumed at step {trainer.progress.step}, pass {trainer.progress.number}", flush=True)
    finished = trainer.run(arguments.save_every, 60 * arguments.stop_after)
    if not finished and not arguments.export_now:
        return f"stopped at step {trainer.progress.step}; go on with --resume"
    round_as_stored(drafter.module)
    judged = Features(target, held_out, drafter.aux_layers, *batches, None if keep is None else keep / "held-out")
    found = measure((judged[i] for i in range(len(judged))), drafter.matches, drafter.steps)
    passes = trainer.progress.number + trainer.progress.taken / len(features)
    trained = Trained(
        drafter.kind,
        drafter.config,
        trainer.progress,
        passes,
        recipe,
        arguments,
        found,
        len(answers),
        len(held_out),
        target.device,
    )
    arguments.out.mkdir(parents=True, exist_ok=True)
    write(arguments.out, drafter, target, trained)
    return table(found)


@torch.no_grad()
def round_as_stored(module: nn.Module) -> None:
    """Weights that bfloat16 holds, as the checkpoint has them."""
    for parameter in module.parameters():
        parameter.copy_(parameter.to(torch.bfloat16))


def write(out: Path, drafter: Drafter, target: Target, trained: Trained) -> None:
    """``config.json``, ``model.safetensors``, ``MODEL_CARD.md``."""
    tensors = dict(drafter.tensors())
    save_file(tensors, out / "model.safetensors.tmp", metadata={"format": "pt"})
    os.replace(out / "model.safetensors.tmp", out / "model.safetensors")
    (out / "model.safetensors").chmod(0o644)
    (out / "config.json").write_text(json.dumps(drafter.config, indent=2) + "\n", encoding="utf-8")
    if drafter.kind == "draft_model":
        draft_model.copy_tokenizer(Path(target.facts.path), out)
    write_card(out, trained, tensors)


def default_aux_layers(num_layers: int) -> tuple[int, ...]:
    """Where EAGLE3 aux_layers (low, middle, high), or spread out where these coincide. Raises ``ValueError``."""
    if num_layers < 3:
        raise ValueError(f"the target has {num_layers} layers; an EAGLE3 head needs three to aux_layer")
    usual = (2, num_layers // 2, num_layers - 3)
    return usual if usual[0] < usual[1] < usual[2] else (1, (num_layers + 1) // 2, num_layers - (num_layers > 3))


def _eagle3(arguments: argparse.Namespace, target: Target, answers: list[Answered]) -> Drafter:
    facts = target.facts
    aux_layers = _aux_layers(arguments, facts.num_layers)
    before = _trained_before(arguments.start_from)
    draft_vocab = _draft_vocab(arguments, facts.vocab_size, answers, before)
    sizes = Eagle3Sizes(
        **_shared_sizes(arguments, target, facts.hidden_size),
        draft_vocab_size=len(draft_vocab),
        aux_layers=aux_layers,
        fc_norm=arguments.fc_norm,
        norm_output=arguments.norm_output,
    )
    embedding = target.embedding().clone()
    head = Eagle3(sizes, draft_vocab.to(embedding.device), embedding).to(target.device)
    _start(head, arguments, target, before)
    return Drafter(
        kind="eagle3",
        module=head,
        loss=lambda batch: chains.chain_loss(head, batch, eagle3.unrolled(head, batch, arguments.ttt_steps)),
        matches=lambda batch: chains.matches(head, batch, eagle3.unrolled(head, batch, MEASURED_STEPS)),
        config=sizes.config(),
        tensors=partial(chains.checkpoint, head),
        aux_layers=aux_layers,
    )


def _parallel_block(arguments: argparse.Namespace, target: Target, answers: list[Answered]) -> Drafter:
    facts = target.facts
    aux_layers = _aux_layers(arguments, facts.num_layers)
    before = _trained_before(arguments.start_from)
    draft_vocab = _draft_vocab(arguments, facts.vocab_size, answers, before)
    mask = arguments.mask_token
    if not 0 <= mask < facts.vocab_size or token_counts(answers, facts.vocab_size)[mask]:
        raise ValueError(f"--mask-token {mask}: expected a token that no answer has, 0 to {facts.vocab_size - 1}")
    sizes = BlockSizes(
        **_shared_sizes(arguments, target, facts.hidden_size),
        draft_vocab_size=len(draft_vocab),
        num_hidden_layers=arguments.layers,
        block_size=arguments.block_size,
        mask_token=mask,
        aux_layers=aux_layers,
    )
    embedding = target.embedding().clone()
    head = ParallelBlock(sizes, draft_vocab.to(embedding.device), embedding).to(target.device)
    _start(head, arguments, target, before)
    return Drafter(
        kind="parallel_block",
        module=head,
        loss=lambda batch: chains.chain_loss(head, batch, parallel_block.filled(head, batch)),
        matches=lambda batch: chains.matches(head, batch, parallel_block.filled(head, batch)),
        config=sizes.config(),
        tensors=partial(chains.checkpoint, head),
        aux_layers=aux_layers,
        steps=sizes.block_size - 1,
    )


def _shared_sizes(
    arguments: argparse.Namespace, target: Target, hidden: int, intermediate: int | None = None
) -> dict[str, Any]:
    """Fields of :class:`Sizes`: as the command line has them, else as the target. ``intermediate``: instead of the
    target's."""
    facts, ops = target.facts, [node.op for node in target.graph.nodes]
    return {
        "hidden_size": hidden,
        "vocab_size": facts.vocab_size,
        "num_attention_heads": arguments.heads or facts.num_heads,
        "num_key_value_heads": arguments.kv_heads or facts.num_kv_heads,
        "head_dim": arguments.head_dim or facts.head_dim,
        "intermediate_size": arguments.intermediate or intermediate or gated_size(target.graph),
        "rms_norm_eps": next(op.eps for op in ops if isinstance(op, Norm)),
        "rope_theta": next((op.facts.theta for op in ops if isinstance(op, Rope)), RopeFacts().theta),
        "max_position_embeddings": facts.max_position,
    }


def gated_size(graph: Graph) -> int:
    """Features of the target's gated layers. Raises ``ValueError`` where it has none beside experts."""
    for node in graph.nodes:
        if isinstance(node.op, Gated):
            return graph.sizes[node.outputs[0]]
    raise ValueError("--intermediate is needed: the target has no gated layer whose size a drafter could take over")


def _aux_layers(arguments: argparse.Namespace, num_layers: int) -> tuple[int, ...]:
    aux_layers = tuple(arguments.aux_layers or default_aux_layers(num_layers))
    if list(aux_layers) != sorted(set(aux_layers)) or not 1 <= aux_layers[0] <= aux_layers[-1] <= num_layers:
        raise ValueError(f"--aux-layers {aux_layers}: expected ascending numbers from 1 to {num_layers}")
    return aux_layers


def _draft_vocab(
    arguments: argparse.Namespace, vocab_size: int, answers: list[Answered], before: Mapping[str, Tensor]
) -> Tensor:
    """The most frequent tokens, or those of ``before``: int64, ascending."""
    counts = token_counts(answers, vocab_size)
    found = counts.topk(min(arguments.draft_vocab or vocab_size, vocab_size)).indices.sort().values
    if before:
        found = before["t2d"].nonzero()[:, 0]
    print(f"draft vocabulary: {len(found)} tokens, {counts[found].sum() / counts.sum():.2%} of the answers", flush=True)
    return found


def _start(
    head: Eagle3 | ParallelBlock, arguments: argparse.Namespace, target: Target, before: Mapping[str, Tensor]
) -> None:
    weight = target.head_weight()
    if before:
        _take(head, before, arguments.start_from)
    elif weight is not None:
        head.start_from(weight.to(target.device))


def _draft_model(arguments: argparse.Namespace, target: Target, answers: list[Answered]) -> Drafter:
    sizes = DraftModelSizes(
        **_shared_sizes(arguments, target, arguments.hidden, 3 * arguments.hidden),
        num_hidden_layers=arguments.layers,
    )
    model = DraftModel(sizes)
    before = {name.removeprefix("model."): t for name, t in _trained_before(arguments.start_from).items()}
    if before:
        _take(model, before, arguments.start_from)
    else:
        model.start_from(target.embedding())
    model.to(target.device)
    return Drafter(
        kind="draft_model",
        module=model,
        loss=partial(draft_model.distillation_loss, model),
        matches=lambda batch: draft_model.matches(model, batch, MEASURED_STEPS),
        config=sizes.config(draft_model.target_config(Path(target.facts.path))),
        tensors=partial(draft_model.checkpoint, model),
        aux_layers=(),
    )


def _trained_before(folder: Path | None) -> dict[str, Tensor]:
    """The tensors of ``--start-from``; none without it."""
    if folder is None:
        return {}
    if not (folder / "model.safetensors").is_file():
        raise ValueError(f"--start-from {folder}: no model.safetensors in it")
    found: dict[str, Tensor] = load_file(folder / "model.safetensors")
    return found


def _take(module: nn.Module, tensors: Mapping[str, Tensor], folder: Path) -> None:
    try:
        module.load_state_dict(dict(tensors))
    except RuntimeError as error:
        raise ValueError(f"--start-from {folder}: a drafter of other sizes ({error})") from error


MAKERS: Mapping[str, Callable[[argparse.Namespace, Target, list[Answered]], Drafter]] = {
    "eagle3": _eagle3,
    "parallel_block": _parallel_block,
    "draft_model": _draft_model,
}
