"""The smallest model that steps can run, and rows for it."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.contracts.attention_kernel import AttentionBatch
from engine.contracts.graph import Builder, Node
from engine.contracts.request import SamplingParams
from engine.kernels.context import Call, StepContext
from engine.kernels.model import LoweredBlock, LoweredModel, Step
from engine.kernels.triton.device import runs_triton
from engine.step.graphs import Bucket, Capture, StepGraphs
from engine.step.plan import Admit, NewBlocks, StepPlan, StepRow
from engine.step.runner import ModelRunner
from engine.step.tables import DeviceTables

from .frozen import FrozenGraphs, RunAgain

VOCAB, HIDDEN, BLOCK, MAX_LEN, MAX_DRAFTS = 40, 8, 4, 48, 3
BROKEN = VOCAB - 1
"""The token after which logits are not finite."""
PROMPT_LEN = 3


class Attention:
    """None."""

    def prepare(self, batch: AttentionBatch) -> AttentionBatch:
        return batch


def toy_model() -> LoweredModel:
    """What follows a token depends on that token alone; its one layer keeps what it is handed in the "cache"."""
    table = torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(1))
    head = table.clone()
    table[BROKEN] = float("nan")

    def layer(context: StepContext, residual: Tensor) -> Tensor:
        context.kv[context.slot_mappings[0]] = residual[:, 0]  # type: ignore[index]
        return residual

    b = Builder()
    entering = b.embed("embed", VOCAB, HIDDEN)
    with b.layer(entering):
        leaving = b.scale(entering, 2.0)  # some op: its kernel is the function above
    b.lm_head(leaving, "head", VOCAB)
    graph = b.graph()
    embed, kept, project = graph.nodes
    logits = block(project, lambda context, hidden: hidden @ head.T)
    return LoweredModel(
        graph=graph,
        embedding=block(embed, lambda context, ids: torch.nn.functional.embedding(ids, table)),
        layers=(block(kept, layer, entering.number),),
        head_block=logits,
        normed_head=logits,
        rotate=lambda positions: (),
        attention=Attention(),  # type: ignore[arg-type]
        lowering=(),
        weights_bytes=0,
        on_triton=runs_triton("cpu"),
    )


def block(node: Node, call: Call, residual: int | None = None) -> LoweredBlock:
    """Of one node. Nobody else reads what it reads."""
    return LoweredBlock((Step(call, node.inputs, node.outputs, node.inputs),), residual)


def make_capture() -> Capture:
    """Kernels that are interpreted are no calls of torch, which could be frozen."""
    return RunAgain() if runs_triton("cpu") else FrozenGraphs()


def make_runner(*buckets: Bucket, num_rows: int = 4, capture: Capture | None = None) -> ModelRunner:
    """The model, a cache that holds nothing but NaN (``runner.kv``, a tensor), tables, and the buckets captured."""
    tables = DeviceTables(num_rows, MAX_LEN, MAX_DRAFTS, BLOCK, "cpu", VOCAB)
    cache, model = torch.full((64 * BLOCK * num_rows,), float("nan")), toy_model()
    runner = ModelRunner(model, cache, tables)  # type: ignore[arg-type]
    if buckets:
        runner.graphs = StepGraphs(model, cache, tables, (0,), buckets, capture or make_capture())  # type: ignore[arg-type]
        runner.graphs.capture()
    return runner


def blocks_of(row_id: int) -> tuple[int, ...]:
    """All that a row may need. Block 0 is nobody's."""
    count = -(-(MAX_LEN + MAX_DRAFTS + 2) // BLOCK)
    return tuple(range(1 + row_id * count, 1 + (row_id + 1) * count))


def all_of(row_id: int) -> tuple[NewBlocks, ...]:
    """A plan's way to say so."""
    return (NewBlocks(0, 0, blocks_of(row_id)),)


def prompt_plan(
    prompts: dict[int, tuple[int, ...]], params: dict[int, SamplingParams] | None = None, stop_ids: tuple[int, ...] = ()
) -> StepPlan:
    """A first step: prompts by row."""
    known = params or {}
    admits = [
        Admit(row_id, tokens, 0, len(tokens), known.get(row_id, SamplingParams(temperature=0.0)), 77 + row_id, stop_ids)
        for row_id, tokens in prompts.items()
    ]
    rows = [StepRow(row_id, 0, len(tokens), new_blocks=all_of(row_id)) for row_id, tokens in prompts.items()]
    return StepPlan(0, tuple(admits), tuple(rows))


def decode(row_id: int, start: int, drafts: tuple[int, ...] = (), **options: object) -> StepRow:
    """A decode step's row, with drafts by a drafter on the host."""
    return StepRow(row_id, start, 1, num_drafts=len(drafts), drafts=drafts, **options)  # type: ignore[arg-type]


def run(runner: ModelRunner, plan: StepPlan) -> list[tuple[int, ...]]:
    """Tokens by row of the plan."""
    runner.apply(plan)
    return [row.tokens for row in runner.launch(plan).result().rows]
