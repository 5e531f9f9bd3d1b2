"""How many bytes a plan will take on its device: plain arithmetic over shapes, before a weight is read."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.assembly.bind import BoundEngine
from engine.assembly.plan import EnginePlan
from engine.contracts.drafter import cached_by, on_device
from engine.contracts.graph import Graph
from engine.contracts.kv_allocator import FEWEST_BLOCKS
from engine.contracts.kv_store import MemoryStore
from engine.drafting.chains import MOST_DRAFTS
from engine.kernels.backends import fused_graph, rotations
from engine.kernels.cpu.rotation_tables import PAGE
from engine.kernels.settings import MOST_TOKENS, replay_obstacle
from engine.kv.cache import KVCache
from engine.kv.groups import PoolShape, cache_groups, of_rank
from engine.models.footprint import alive_in_a_layer, made_in_a_layer
from engine.models.placement import RankGraph
from engine.sampling.state import STATE_BYTES_PER_ROW
from engine.startup.lowering import lowering_of
from engine.startup.memory.budget import Budget
from engine.startup.memory.weights import WeightSizes
from engine.step.runner import PROMPT_LOGPROB_ROWS

GRAPHS_BYTES = 512 * 2**20
"""For captured steps, before anything is loaded; what they take is measured after loading (``profile_run.py``)."""
PROCESS_OVERHEAD = 10 * 2**20
"""On a CPU: objects of requests and steps, buffers of libraries, holes in the heap. Measured with
``tools/benchmarks/memory_peak.py``."""
HEAP_SLACK = 1.5
"""On a CPU, heap taken over tensors alive: tensors of many sizes come and go in every step, and what one leaves does
not always hold the next. Measured likewise."""
SAMPLING_COPIES = 4
"""Float32 ``[rows, vocab]`` at once while sampling: logits, the adjusted copy, the scaled copy, noise."""
NUMBER_BYTES = 8
"""Of token ids and positions: int64."""
SMALL_INPUTS = 8
"""Such numbers for each token of a program's inputs."""
PROMPT_COPIES = 2
"""The same for logprobs of prompt tokens: logits and their logarithms."""


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """Bytes on the device by purpose, and the sizes of KV pool that make sense."""

    weights: int
    drafter: int
    """Weights of a drafter's own."""
    loading: int
    """Beside the weights, while they are loaded."""
    workspace: int
    """Activations and logits of the largest step. It takes the memory that loading gave back."""
    tables: int
    programs: int
    """Of native calls: see :mod:`engine.kernels.cpu.program`."""
    process_overhead: int
    """What the process takes that is not a tensor; 0 where tensors are in another memory."""
    stores: int
    """Of KV stores in this memory: a rank's part."""
    graphs: int
    pool: PoolShape
    """How large the pools of the KV groups are. Its unit is what blocks are counted in below: that of a group which
    keeps every token."""
    smallest_blocks: int
    """The smallest pool that is of use: ``memory.kv_tokens``, else one request of ``model.max_len``; with the padding
    block."""
    largest_blocks: int
    """Beyond this many no request could use another block."""

    @property
    def fixed(self) -> int:
        """Everything but the KV pool."""
        steps = max(self.loading, self.workspace) + self.programs + self.graphs
        return self.weights + self.drafter + steps + self.tables + self.process_overhead + self.stores

    def total(self, blocks: int) -> int:
        """The peak with a pool of ``blocks``."""
        return self.fixed + self.pool.num_bytes(blocks)

    @property
    def smallest(self) -> int:
        """The peak with the smallest useful pool."""
        return self.total(self.smallest_blocks)


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """An estimate that fits."""

    plan: EnginePlan
    own: RankGraph | None
    """What of the model this rank computes; ``None``: all."""
    estimate: MemoryEstimate
    budget: Budget


def estimate_memory(
    plan: EnginePlan, weights: WeightSizes, bound: BoundEngine, own: RankGraph | None = None
) -> MemoryEstimate:
    """What ``plan`` takes. ``bound``: its plugins; ``own``: what of the model this rank computes, ``None``: all.
    Arithmetic alone: nothing is built or read."""
    drafter = bound.drafter
    max_width, on_its_device = drafter.max_width, on_device(drafter)
    max_requests, token_budget = plan.scheduler.max_requests, plan.scheduler.token_budget
    block_size = plan.block_size
    per_request = -(-plan.max_len // block_size)
    wanted = plan.settings.memory.kv_tokens
    asked = -(-wanted // block_size) if wanted is not None else per_request
    graph = bound.graph
    groups = cache_groups(graph.caches, cached_by(drafter), plan.layout.dcp)
    full_share = groups.full_share
    if own is not None:
        graph, groups = own.graph, of_rank(groups, own)
    most_tokens, most_rows = min(token_budget, max_requests * plan.max_len), max_requests * (1 + max_width)
    return MemoryEstimate(
        weights=weights.held,
        drafter=0 if on_its_device is None else on_its_device.weights_bytes,
        loading=weights.loading,
        workspace=_workspace(plan, bound, graph, most_tokens, most_rows),
        tables=_tables(max_requests, plan.max_len + max_width + 2, block_size, groups.num_groups),
        programs=_programs(plan, bound, graph, block_size, groups.num_groups),
        process_overhead=PROCESS_OVERHEAD if plan.device.kind == "cpu" else 0,
        stores=-(-_stores(bound) // plan.layout.size) if plan.device.kind == "cpu" else 0,
        graphs=GRAPHS_BYTES if plan.execution == "graphs" else 0,
        pool=PoolShape(
            groups.reaches,
            KVCache.block_bytes(groups, bound.kv_format, block_size, plan.dtype),
            block_size,
            plan.max_len,
            # The core makes room for the drafts after a step, too.
            step_tokens=token_budget + max_width + 1,
            max_requests=max_requests,
            full_share=full_share,
            caches_prefixes=bound.kv_allocator.caches_prefixes,
            for_one=per_request if wanted is None else 0,
        ),
        smallest_blocks=max(FEWEST_BLOCKS, asked + 1),
        largest_blocks=max(FEWEST_BLOCKS, (asked if wanted is not None else max_requests * per_request) + 1),
    )


def _stores(bound: BoundEngine) -> int:
    return sum(store.most_bytes for store in bound.kv_stores if isinstance(store, MemoryStore))


def _tables(max_requests: int, width: int, block_size: int, groups: int) -> int:
    """Of :class:`engine.step.tables.DeviceTables`, row by row: token history, block ids, lengths, sampling state."""
    return (max_requests + 1) * (width * 8 + groups * -(-width // block_size) * 4 + 8 + STATE_BYTES_PER_ROW)


def _programs(plan: EnginePlan, bound: BoundEngine, graph: Graph, block_size: int, groups: int) -> int:
    """What programs of native calls take: the buffers of a layer of :data:`MOST_TOKENS` tokens, which all programs
    share, their inputs, and rotations of all positions. Those of a drafter's layers are estimated as if they were of
    the target's sizes."""
    attention = bound.attention_kernel
    if plan.device.kind != "cpu" or plan.execution == "eager":
        return 0
    if replay_obstacle(bound.kv_format, plan.dtype, attention) is not None:
        return 0
    model, drafter = plan.model, on_device(bound.drafter)
    item: int = getattr(torch, plan.dtype).itemsize
    rotation = _rotations(graph)
    hidden, blocks = model.hidden_size * item, groups * -(-plan.max_len // block_size) * 4
    layer = hidden + made_in_a_layer(graph) * item + 2 * rotation
    inputs, tables, logits = blocks + SMALL_INPUTS * NUMBER_BYTES, (plan.max_len + PAGE) * rotation, 0
    if drafter is not None:
        # A drafter is handed hidden states and leaves one, and a chain has one more; a step leaves them and its own.
        states = len(drafter.aux_layers) + 3
        layer += states * hidden
        inputs += 2 * states * hidden + MOST_DRAFTS * NUMBER_BYTES
        tables, logits = 2 * tables, 2 * _logits(plan, MOST_TOKENS, 1)
    return MOST_TOKENS * (layer + inputs) + tables + logits


def _workspace(plan: EnginePlan, bound: BoundEngine, graph: Graph, tokens: int, rows: int) -> int:
    """Tensors alive at once in the fullest moment of a step of ``tokens`` tokens of which ``rows`` are sampled."""
    item = getattr(torch, plan.dtype).itemsize
    stream = tokens * graph.hidden_size * item
    rotation = tokens * 2 * _rotations(graph)
    # Outside compiled kernels, norm and rotation go through float32 copies.
    heads = max((op.num_heads + op.num_kv_heads) * op.head_dim for op in plan.model.attentions)
    wide = 0 if plan.execution != "eager" else tokens * max(graph.hidden_size, heads) * torch.float32.itemsize
    embed, *layers, _ = fused_graph(graph, lowering_of(plan, bound, graph))
    layer = tokens * alive_in_a_layer(graph, embed, layers) * item
    logits = _logits(plan, min(rows, tokens), SAMPLING_COPIES)
    prompt_logprobs = _logits(plan, min(PROMPT_LOGPROB_ROWS, tokens), PROMPT_COPIES)
    alive = 2 * stream + rotation + wide + max(layer, logits, prompt_logprobs)
    return int(alive * HEAP_SLACK) if plan.device.kind == "cpu" else alive


def _rotations(graph: Graph) -> int:
    """Bytes of the cosines and sines of a token."""
    return sum(op.facts.rotary_dim or op.head_dim for op in rotations(graph)) * torch.float32.itemsize


def _logits(plan: EnginePlan, rows: int, copies: int) -> int:
    item = getattr(torch, plan.dtype).itemsize
    float_bytes = torch.float32.itemsize
    return rows * plan.model.vocab_size * (copies * float_bytes + (item if item < float_bytes else 0))
