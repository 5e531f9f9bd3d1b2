"""What a rank's weights and caches take is known before anything is loaded: every family, however it is shared out."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
from tools.benchmarks.families import TESTS, suites
from tools.benchmarks.ranks import LAYOUTS, communicator

from engine.assembly.assemble import assemble
from engine.assembly.bind import bind
from engine.checkpoint.tensors import Checkpoint, open_checkpoint
from engine.contracts.graph import Graph
from engine.contracts.ops import Attention, Experts
from engine.kernels.backends import kernels_for
from engine.kv.cache import KVCache
from engine.kv.groups import cache_groups, of_rank
from engine.models.layout import Layout
from engine.models.placement import place
from engine.models.record import recorded
from engine.models.sharding import smallest_cut
from engine.startup.memory.estimate import estimate_memory
from engine.startup.memory.fit import plan_memory
from engine.startup.memory.weights import weight_sizes
from engine.testing.architecture import ArchitectureConformance
from engine.testing.ranks import Ranks
from tests.native import needs_compiler
from tests.plugins.quantizer.checkpoint import mixtures, test_mxfp4
from tests.plugins.quantizer.checkpoint.writers import CASES
from tests.selection import few

QUIET = ("device=cpu", "threads=1", "exporter=[]", "model.dtype=float32")
ALWAYS = ("tp 3", "tp 2 x pp 2", "ep 2")


UNLIKE = (
    "Olmo2ForCausalLM", "Phi3ForCausalLM", "DeepseekV3ForCausalLM", "GptOssForCausalLM", "Qwen2MoeForCausalLM",
    "Gemma4ForCausalLM", "Qwen3ForCausalLM", "Qwen3NextForCausalLM",
)  # fmt: skip
"""Norms over all heads, fused projections, latent attention, experts stored together and one by one, caches that layers
share, a tied head, recurrent layers."""


def models() -> Iterator[Any]:
    """One of each of those; the others take their time."""
    for suite in suites(sorted(TESTS.glob("test_*.py"))):
        for family, names in groupby(suite.models(), key=lambda name: suite.config(name).architecture):
            for number, name in enumerate(names):
                marks = () if number == 0 and family in UNLIKE else (pytest.mark.slow,)
                yield pytest.param(suite, name, id=name if number else family, marks=marks)


def check(folder: str | Path, layouts: dict[str, Layout], *overrides: str) -> None:
    plan = assemble([f"model.path={folder}", *QUIET, *overrides])
    bound, checkpoint = bind(plan), open_checkpoint(str(folder))
    graph = recorded(bound.architecture, plan.model)
    has_experts = any(isinstance(node.op, Experts) for node in graph.nodes)
    for name, layout in layouts.items():
        if layout.ep > 1 and not has_experts:
            continue
        heads = min(node.op.num_heads for node in graph.nodes if isinstance(node.op, Attention))
        if layout.tp > heads or (name == "pp 3" and len(stages(graph)) < 3):
            continue
        kernels = kernels_for(plan.execution, "cpu")
        with Ranks(plan.model, graph, layout, communicator, kernels=kernels, quantizer=bound.quantizer) as ranks:
            for rank, (own, loop) in enumerate(zip(ranks.placed, ranks.loops, strict=True)):
                sizes = weight_sizes(plan, bound, checkpoint, own.graph)
                assert sizes.held == loop.model.weights_bytes, f"{name}, rank {rank}"
                estimate = estimate_memory(plan, sizes, bound, own)
                groups = of_rank(cache_groups(graph.caches), own)
                blocks = estimate.pool.blocks(9)
                kv = KVCache(groups, bound.kv_format, blocks, estimate.pool.block_size, "float32", "cpu")
                assert kv.num_bytes == estimate.pool.num_bytes(9), f"{name}, rank {rank}"


def stages(graph: Graph) -> list[int]:
    """Where one may begin: no layer of it reads a cache of an earlier one."""
    used = [{node.cache for node in layer.nodes if node.cache is not None} for layer in graph.layers]
    return [i for i in range(len(used)) if not set().union(*used[:i]) & set().union(*used[i:])]


MODELS = list(models())


@few(2)
@pytest.mark.parametrize("execution", ["eager", pytest.param("compile", marks=[needs_compiler, pytest.mark.slow])])
@pytest.mark.parametrize(("suite", "name"), MODELS)
def test_a_rank_takes_what_was_planned(suite: ArchitectureConformance, name: str, execution: str) -> None:
    with suite.checkpoint(name) as (model, _, _):
        check(model.path, {layout: LAYOUTS[layout] for layout in ALWAYS}, f"execution={execution}")


@pytest.mark.slow
@pytest.mark.parametrize(("suite", "name"), MODELS)
def test_a_rank_takes_what_was_planned_in_every_layout(suite: ArchitectureConformance, name: str) -> None:
    with suite.checkpoint(name) as (model, _, _):
        check(model.path, dict(LAYOUTS), "execution=eager")


@few(2)
@pytest.mark.parametrize("execution", ["eager", pytest.param("compile", marks=needs_compiler)])
@pytest.mark.parametrize("name", ["fp8 block", "ct int8 channel", "ct w4 g32 asym", "awq g32", "gptq w4 g32 sym"])
def test_a_rank_of_a_quantized_checkpoint_takes_what_was_planned(name: str, execution: str, tmp_path: Path) -> None:
    folder = mixtures.write_mixture(tmp_path, CASES[name])[0]
    layouts = {name: LAYOUTS[name] for name in ("tp 2", "ep 2")}
    check(folder, layouts, f"execution={execution}")


@few(1)
@pytest.mark.parametrize("quantizer", ["int8", "int4", "fp8"])
def test_a_rank_that_rounds_its_share_takes_what_was_planned(quantizer: str, tmp_path: Path) -> None:
    _, dense = mixtures.write_mixture(tmp_path, CASES["fp8 block"])
    more = ("quantizer.group_size=32",) if quantizer == "int4" else ()
    check(dense, {name: LAYOUTS[name] for name in ("tp 2", "ep 2")}, f"quantizer={quantizer}", *more)


@few(1)
@pytest.mark.parametrize("execution", ["eager", pytest.param("compile", marks=needs_compiler)])
def test_a_rank_with_experts_that_are_stored_together_takes_what_was_planned(execution: str, tmp_path: Path) -> None:
    check(test_mxfp4.write(tmp_path)[0], {name: LAYOUTS[name] for name in ("tp 2", "ep 2")}, f"execution={execution}")


# -- bytes that are read


def read_bytes(folder: Path, layout: Layout, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, int]]:
    """By rank and tensor."""
    plan = assemble([f"model.path={folder}", *QUIET, "execution=eager"])
    bound, found = bind(plan), []
    read = Checkpoint.read

    def counting(self: Checkpoint, name: str, cuts: Any = ()) -> Any:
        tensor = read(self, name, cuts)
        by_checkpoint.setdefault(id(self), {})[name] = by_checkpoint.get(id(self), {}).get(name, 0) + tensor.nbytes
        kept.append(self)
        return tensor

    by_checkpoint: dict[int, dict[str, int]] = {}
    kept: list[Checkpoint] = []
    monkeypatch.setattr(Checkpoint, "read", counting)
    graph = recorded(bound.architecture, plan.model)
    Ranks(plan.model, graph, layout, communicator, quantizer=bound.quantizer).close()
    monkeypatch.undo()
    found = list(by_checkpoint.values())
    assert len(found) == layout.size
    return found


REPEATED = ("norm", "router", ".gate.", "shared_expert_gate", "weight_shape", "sinks")
"""Of names of tensors that every rank reads whole."""
SHARED = ("g_idx", "scale_inv")
"""Of those that ranks with other outputs of the same inputs, or other rows of a block, read as well."""


@few(2)
@pytest.mark.parametrize("layout", ["tp 2", "ep 2", "pp 2", "tp 2 x pp 2"])
@pytest.mark.parametrize("name", ["fp8 block", "ct w4 g32 asym", "gptq w4 g32 sym", "mxfp4", "unquantized", "together"])
def test_ranks_read_their_shares_and_no_more(
    name: str, layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of them together read the checkpoint once."""
    if name == "mxfp4":
        folder = test_mxfp4.write(tmp_path)[0]
    elif name == "together":
        folder = test_mxfp4.write(tmp_path)[1]
    else:
        quantized, dense = mixtures.write_mixture(tmp_path, CASES["fp8 block" if name == "unquantized" else name])
        folder = dense if name == "unquantized" else quantized
    by_rank = read_bytes(folder, LAYOUTS[layout], monkeypatch)
    checkpoint = open_checkpoint(str(folder))
    for tensor in checkpoint.names:
        size = checkpoint.entry(tensor).num_bytes
        taken = [read[tensor] for read in by_rank if tensor in read]
        if any(part in tensor for part in REPEATED):
            assert set(taken) == {size}, tensor
        elif any(part in tensor for part in SHARED):
            assert size <= sum(taken) and max(taken) <= size, f"{tensor}: {taken} of {size}"
        else:
            assert sum(taken) == size, f"{tensor}: {taken} of {size}"


def test_the_estimate_of_a_rank_is_of_what_it_holds(tmp_path: Path) -> None:
    folder, _ = mixtures.write_mixture(tmp_path, CASES["fp8 block"])
    plan = assemble([f"model.path={folder}", *QUIET, "execution=eager"])
    bound = bind(plan)
    graph = recorded(bound.architecture, plan.model)
    ranks = place(graph, Layout(2), partial(smallest_cut, bound.quantizer))
    whole, *parts = (plan_memory(plan, bound, free=1 << 40, own=one).estimate for one in (None, *ranks))
    assert whole.weights < sum(part.weights for part in parts) < 1.05 * whole.weights
    assert [part.pool.block_bytes for part in parts] == [tuple(size // 2 for size in whole.pool.block_bytes)] * 2
