"""Steps of few tokens as programs: the same as op by op, bit for bit, and a reason where they cannot be."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from engine.assembly.assemble import assemble
from engine.assembly.bind import bind
from engine.contracts.model import ModelConfig, ModelFacts
from engine.kernels.cpu.captured import CapturedSteps, Programs, capture_steps
from engine.kernels.loading import load_model
from engine.kernels.metadata import ForwardMetadata
from engine.kernels.model import LoweredModel
from engine.kernels.settings import MOST_TOKENS
from engine.models.record import recorded
from engine.startup.rank import load_plan
from engine_plugins.architecture.llama import LlamaArchitecture
from engine_plugins.attention_kernel.torch_paged import TorchAttention
from tests.kernels.paged_loop import BLOCK_SIZE, PagedLoop
from tests.native import needs_compiler
from tests.selection import few

from ...laws.drafted import Models

pytestmark = needs_compiler

TOKENS = [(7 * i + 3) % 120 for i in range(70)]
AUX_LAYERS = (2, 0, 3)
MAX_LEN = 160
ROWS = {1: [(0, 1)], 2: [(1, 1), (2, 1)], 3: [(1, 1), (2, 2)], 16: [(3, 5), (0, 4), (1, 7)]}
"""Of a step by its number of tokens: sequence and tokens. Of other numbers: three rows."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("models"))


def lowered(models: Models, family: str, *overrides: str) -> tuple[ModelFacts, LoweredModel, str]:
    fixed = ("device=cpu", "threads=1", "execution=compile", "exporter=[]", f"kv_allocator.block_size={BLOCK_SIZE}")
    plan = assemble([f"model.path={models.path(family)}", *fixed, *overrides])
    return plan.model, load_plan(plan, bind(plan)), plan.dtype


def captured(loop: PagedLoop, aux_layers: tuple[int, ...] = AUX_LAYERS) -> CapturedSteps:
    """Have a loop run its steps of few tokens as programs."""
    with torch.inference_mode():
        loop.model = capture_steps(loop.model, loop.kv, MAX_LEN, aux_layers)
    steps = loop.model.small_steps
    assert isinstance(steps, CapturedSteps)
    return steps


def rows_of(count: int) -> list[tuple[int, int]]:
    rows = ROWS.get(count) or [(3, 1), (0, count - 3), (1, 2)]
    return [((sequence + count) % 4, length) for sequence, length in rows]


@torch.inference_mode()
def compare(facts: ModelFacts, model: LoweredModel, dtype: str) -> CapturedSteps:
    """Steps of every number of tokens, at other positions, in other blocks and of other sequences each time."""
    one, other = PagedLoop(facts, model, dtype), PagedLoop(facts, model, dtype)
    steps = captured(one)
    for loop in (one, other):
        for _ in range(4):
            loop.step([(loop.add(), TOKENS[:40])], AUX_LAYERS)
    for count in (*range(1, MOST_TOKENS + 1), 1, 16):
        step = [(sequence, TOKENS[count + sequence :][:length]) for sequence, length in rows_of(count)]
        got, want = (loop.step(step, AUX_LAYERS) for loop in (one, other))
        assert torch.equal(got[0], want[0]), f"{count} tokens"
        assert len(got[1]) == len(AUX_LAYERS) and all(map(torch.equal, got[1], want[1])), f"{count} tokens"
        steps.programs.memory[: max(program.num_bytes for program in steps.programs.written)].fill_(0xFF)
    layers = zip(one.kv.layers.values(), other.kv.layers.values())
    assert all(torch.equal(a.k, b.k) and torch.equal(a.v, b.v) for a, b in layers)
    return steps


@few(6)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("Llama", ()),
        ("Qwen2", ()),
        ("Qwen3", ()),
        ("Llama", ("quantizer=int8",)),
        ("Llama", ("quantizer=int8", "quantizer.activations=int8")),
        ("Qwen2", ("quantizer=int4", "quantizer.group_size=32")),
        ("Llama", ("quantizer=fp8", "quantizer.head=none")),
    ],
)
def test_a_step_as_a_program_equals_the_step_op_by_op(
    models: Models, family: str, overrides: tuple[str, ...], dtype: str
) -> None:
    facts, model, _ = lowered(models, family, f"model.dtype={dtype}", *overrides)
    steps = compare(facts, model, dtype)
    assert steps.programs.notes() == () and len(steps.programs.written) == MOST_TOKENS


@pytest.mark.parametrize("field", ["positions", "slot_mappings", "block_tables"])
def test_an_input_that_stays_as_it_was_is_seen(models: Models, field: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the comparison above is worth."""
    facts, model, dtype = lowered(models, "Llama", "model.dtype=float32")
    fill, first = Programs.fill, {}

    def stale(self: Programs, metadata: ForwardMetadata) -> None:
        (slots,), (attention,) = metadata.slot_mappings, metadata.attention
        found = {"positions": metadata.positions, "slot_mappings": slots, "block_tables": attention.block_tables}[field]
        kept = first.setdefault(found.shape, found.clone())
        if field == "positions":
            fill(self, replace(metadata, positions=kept))
        elif field == "slot_mappings":
            fill(self, replace(metadata, slot_mappings=(kept,)))
        else:
            fill(self, replace(metadata, attention=(replace(attention, block_tables=kept),)))

    monkeypatch.setattr(Programs, "fill", stale)
    with pytest.raises(AssertionError, match="tokens"):
        compare(facts, model, dtype)


def test_what_a_step_returns_stays_when_the_next_one_runs(models: Models) -> None:
    facts, model, dtype = lowered(models, "Llama", "model.dtype=float32")
    loop = PagedLoop(facts, model, dtype)
    captured(loop)
    sequence = loop.add()
    hidden, aux_layers = loop.step([(sequence, TOKENS[6:9])], AUX_LAYERS)
    before = [hidden.clone(), *(aux_layer.clone() for aux_layer in aux_layers)]
    loop.step([(sequence, TOKENS[9:12])], AUX_LAYERS)
    assert all(map(torch.equal, [hidden, *aux_layers], before))


def test_other_hidden_states_and_other_caches_run_op_by_op(models: Models) -> None:
    facts, model, dtype = lowered(models, "Llama", "model.dtype=float32")
    loop, elsewhere = PagedLoop(facts, model, dtype), PagedLoop(facts, model, dtype)
    captured(loop, ())
    elsewhere.model = loop.model
    got = [loop.step([(loop.add(), TOKENS[:3])], AUX_LAYERS), elsewhere.step([(elsewhere.add(), TOKENS[:3])])]
    assert len(got[0][1]) == len(AUX_LAYERS) and torch.equal(got[0][0], got[1][0])


def test_a_program_is_printed_layer_by_layer(models: Models) -> None:
    facts, model, dtype = lowered(models, "Llama", "model.dtype=float32")
    steps = captured(PagedLoop(facts, model, dtype), ())
    title, *lines = str(steps.programs.written[2]).splitlines()
    calls = [line.strip() for line in lines if "(" in line]
    assert title == f"a step, 3 tokens: {len(calls)} calls"
    per_layer = ["rms_norm", "linear", "rotate_and_write", "attention", "linear", "rms_norm", "linear", "linear"]
    expected = [*["gather_rows"] * 3, *per_layer * facts.num_layers]
    assert [call.partition("(")[0].removesuffix("_float32").removesuffix("_float") for call in calls] == expected
    assert calls[2] == "gather_rows(float32[120, 64], 120, 256, argument_0, 3, embedded)"
    assert calls[3] == "rms_norm_float(*, 3, embedded, 64, normed)"
    assert calls[3:11] == calls[11:19], "layers share their scratch"


@pytest.mark.parametrize("without", ["linear", "attention"])
def test_a_plugin_without_native_calls_runs_op_by_op_and_the_plan_says_so(models: Models, without: str) -> None:
    """A linear layer is found out while programs are written; the kernel's missing method is known from the plan."""
    overrides = ("quantizer=fp8", "quantizer.activations=fp8", "quantizer.head=none")
    facts, model, dtype = lowered(models, "Llama", "model.dtype=float32", *(overrides if without == "linear" else ()))
    if without == "linear":
        steps = compare(facts, model, dtype)
        (note,) = steps.programs.notes()
        assert note.startswith("a step runs uncaptured (slower): its linear layers (fp8 panels")
        assert note.endswith("have no native calls")
        return
    plan = assemble([f"model.path={models.path('Llama')}", "device=cpu", "threads=1", "model.dtype=float32"])
    bound = bind(plan)
    torch_paged = TorchAttention(None, bound.context)  # type: ignore[arg-type]
    parts = (bound.quantizer, torch_paged, bound.kv_format)
    other = load_model(facts, recorded(bound.architecture, facts), *parts, dtype, "cpu", kernels="native")
    assert other.lowering[-1] == "steps: run uncaptured (slower): the attention kernel has no native calls"
    assert capture_steps(other, PagedLoop(facts, other, dtype).kv, MAX_LEN) is other


def test_keys_stored_in_another_dtype_run_op_by_op(models: Models) -> None:
    _, model, _ = lowered(models, "Llama", "model.dtype=float32", "kv_format=int8")
    assert not model.capturable
    assert model.lowering[-1] == "steps: run uncaptured (slower): keys are stored as int8"


class FromTheFirst(LlamaArchitecture):
    """Every layer adds what the first one has between its products."""

    def describe(self, model: ModelConfig, b: Any) -> None:
        made: list[Any] = []

        def gated(*args: Any) -> Any:
            made.append(type(b).gated(b, *args))
            return made[0] if len(made) == 1 else b.add(made[-1], made[0])

        b.gated = gated
        super().describe(model, b)


def test_a_value_that_outlives_its_layer_runs_op_by_op_and_stays_as_it_is(models: Models) -> None:
    """Layers of a program share their memory: another layer would read what it has written itself."""
    plan = assemble([f"model.path={models.path('Llama')}", "device=cpu", "threads=1", "model.dtype=float32"])
    bound = bind(plan)
    graph = recorded(FromTheFirst(None), plan.model)  # type: ignore[arg-type]
    parts = (bound.quantizer, bound.attention_kernel, bound.kv_format, plan.dtype, "cpu")
    native, reference = (load_model(plan.model, graph, *parts, kernels=kind) for kind in ("native", "reference"))
    loop, want = PagedLoop(plan.model, native, plan.dtype), PagedLoop(plan.model, reference, plan.dtype).logits(TOKENS)
    steps = captured(loop, ())
    why = "later layers read more of one than its residual stream"
    assert steps.programs.notes() == (f"a step runs uncaptured (slower): {why}",)
    sequence = loop.add()
    got = torch.cat([loop.model.head(loop.step([(sequence, [token])])[0]) for token in TOKENS])
    assert float((got - want).abs().max()) <= 1e-4
