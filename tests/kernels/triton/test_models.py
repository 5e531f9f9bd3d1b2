"""Whole models on the Triton kernels: the reference's results, few launches, and a plan that tells the truth."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from triton.runtime.interpreter import InterpretedFunction

from engine.contracts.config import SlotConfig
from engine.contracts.ops import LinearSpec
from engine.contracts.quantizer import CustomWeight, WeightFormat
from engine.kernels.context import StepContext
from engine.kernels.model import LoweredBlock, LoweredModel
from engine.kernels.settings import Kernels
from engine.step.plan import StepRow
from engine.step.tables import DeviceTables
from engine.testing.attention_cases import PlainFormat
from engine.testing.context import build_context
from engine.testing.random_model import BLOCK, RandomModel, random_model
from engine_plugins.architecture.deepseek import DeepseekArchitecture
from engine_plugins.architecture.experts import QwenMoeArchitecture
from engine_plugins.architecture.gpt_oss import GptOssArchitecture
from engine_plugins.attention_kernel.triton.kernel import TritonAttention
from engine_plugins.quantizer.config import FP8Config, Int4Config, Int8Config, UnquantizedConfig
from engine_plugins.quantizer.on_load import FP8, Int4, Int8
from engine_plugins.quantizer.unquantized import Unquantized
from tests.kernels.paged_loop import PagedLoop, load
from tests.kernels.triton.models import FAMILIES, write
from tests.launches import Launches, count_launches
from tests.selection import few

TOKENS = [(7 * i + 3) % 120 for i in range(37)]
TOLERANCE = {"float32": 3e-5, "bfloat16": 0.15, "float16": 0.02}
CHUNKS = ((0, 17), (17, 33), (33, 36), (36, 37))
"""Of TOKENS: more than 16 rows, exactly 16, a few, one."""
FEWER_CHUNKS = ((0, 17), (17, 20), (20, 21))
"""The same without exactly 16."""


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {family: write(tmp_path_factory.mktemp(family), family) for family in FAMILIES}


def chunked_logits(loop: PagedLoop, chunks: Sequence[tuple[int, int]] = CHUNKS) -> Tensor:
    sequence = loop.add()
    return torch.cat([loop.model.head(loop.step([(sequence, TOKENS[a:b])])[0]) for a, b in chunks])


@few(1)
@pytest.mark.parametrize(
    ("family", "dtype"),
    [("llama", "float16"), ("qwen2", "bfloat16"), ("qwen3", "float32"), ("llama_biased", "float32")],
)
def test_logits_equal_the_reference_at_every_number_of_rows(
    checkpoints: dict[str, Path], family: str, dtype: str
) -> None:
    facts, fast = load(checkpoints[family], dtype, kernels="triton")
    _, plain = load(checkpoints[family], dtype, kernels="reference")
    want = PagedLoop(facts, plain, dtype).logits(TOKENS)
    loop = PagedLoop(facts, fast, dtype)
    poison(loop)
    got = chunked_logits(loop)
    assert got.dtype == torch.float32 and float(want.abs().max()) > 2.0
    assert float((got - want).abs().max()) <= TOLERANCE[dtype]


def poison(loop: PagedLoop) -> None:
    """NaN wherever nothing has been written yet."""
    for layer in loop.kv.layers.values():
        layer.k.fill_(float("nan"))
        layer.v.fill_(float("nan"))


@pytest.mark.parametrize("rows", [1, 3, 20])
def test_the_tokens_of_the_projection_are_those_of_its_logits(checkpoints: dict[str, Path], rows: int) -> None:
    _, model = load(checkpoints["llama"], kernels="triton")
    hidden = torch.randn(rows, 64, generator=torch.Generator().manual_seed(rows))
    logits, tokens = model.greedy(hidden)
    assert torch.equal(logits, model.head(hidden)) and torch.equal(tokens, logits.argmax(-1))


def layer_launches(path: Path, rows: int, quantizer: Any = None) -> Launches:
    """Of one layer, attention aside, in a step of ``rows`` tokens."""
    facts, model = load(path, kernels="triton", quantizer=quantizer)
    loop = PagedLoop(facts, model)
    slots, positions = torch.arange(rows), torch.arange(rows)
    context = StepContext(model.rotate(positions), (slots,), (None,), loop.kv, positions, batches=())
    layer = model.layers[1]
    # Attention: its output is as large as its queries.
    steps = [replace(step, call=lambda context, q: q) if index == 1 else step for index, step in enumerate(layer.steps)]
    residual = torch.randn(rows, 64, generator=torch.Generator().manual_seed(rows))
    with torch.inference_mode(), count_launches() as launches:
        LoweredBlock(tuple(steps)).run({layer.residual: residual}, context)
    return launches


@few(3)
@pytest.mark.parametrize(
    ("family", "rows"), [*((family, 1) for family in FAMILIES), ("llama_biased", 4), ("qwen3", 4), ("llama", 16)]
)
def test_a_layer_is_four_launches_beside_attention(checkpoints: dict[str, Path], family: str, rows: int) -> None:
    launches = layer_launches(checkpoints[family], rows)
    qkv = ["linear_store", "norm_rope_write"] if family == "qwen3" else ["linear_rope_write"]
    assert launches.names == [*qkv, "linear_store", "linear_gate", "linear_store"]


def test_many_rows_are_torch_products_with_one_kernel_between(checkpoints: dict[str, Path]) -> None:
    launches = layer_launches(checkpoints["llama"], 17)
    assert launches.kernels == ["norm_rope_write", "gate_rows"]
    assert launches.torch_ops.count("aten.addmm_") == 2


def test_the_counter_sees_hidden_torch_ops() -> None:
    x = torch.ones(4, 4)
    with count_launches() as launches:
        y = torch.empty(2, 2), x.view(16), x[1:], x.T
        x.add_(1.0)
        torch.nn.functional.silu(x)
    assert launches.names == ["aten.add_", "aten.silu"] and len(y) == 4


def line(model: LoweredModel, name: str) -> str:
    (text,) = (text for text in model.lowering if text.startswith(f"{name}:"))
    return text


def test_the_plan_says_which_rows_take_which_kernels(checkpoints: dict[str, Path]) -> None:
    _, model = load(checkpoints["llama"], kernels="triton")
    assert line(model, "norm, linear, rope, kv_write").startswith(
        "norm, linear, rope, kv_write: 1 to 16 rows: one Triton kernel: norm, product, rotation, KV write; else: "
    )
    assert "F.linear, Triton gate" in line(model, "norm, linear, gated")
    assert line(model, "linear, add").endswith("float32 F.linear, add in the linear")
    _, model = load(checkpoints["qwen3"], kernels="triton")
    assert "two Triton kernels" in line(model, "norm, linear, norm, norm, rope, kv_write")


class Unfusable(Unquantized):
    """Weights in a format that no fused kernel reads."""

    def format(self, spec: LinearSpec) -> Any:
        return WeightFormat(32, spec.in_features, scale_bytes=0, custom=True)

    def pack(self, spec: LinearSpec, parts: Sequence[Mapping[str, Tensor]], dtype: Any, device: str) -> Any:
        plain = super().pack(spec, parts, dtype, device)
        bias = None if plain.bias is None else plain.bias.float()
        return CustomWeight(
            {"weight": plain.weight.float()}, spec.out_features, spec.in_features, itemgetter("weight"), bias=bias
        )


def test_a_layer_without_tile_loader_takes_the_unfused_chain_and_the_plan_says_so(
    checkpoints: dict[str, Path],
) -> None:
    quantizer = Unfusable(UnquantizedConfig(), build_context())
    facts, model = load(checkpoints["llama"], kernels="triton", quantizer=quantizer)
    for name in ("norm, linear, rope, kv_write", "linear, add", "norm, linear, gated", "norm, linear"):
        assert line(model, name).startswith(f"{name}: unfused (weights: no tile loader): ")
    assert layer_launches(checkpoints["llama"], 2, quantizer).kernels == ["norm_rope_write", "gate_rows"]
    _, plain = load(checkpoints["llama"], kernels="reference")
    want = PagedLoop(facts, plain).logits(TOKENS[:5])
    assert float((PagedLoop(facts, model).logits(TOKENS[:5]) - want).abs().max()) <= 3e-5


def quantizers() -> dict[str, Any]:
    context = build_context()
    return {
        "int8": Int8(Int8Config(), context),
        "int8, activations too": Int8(Int8Config(activations="int8"), context),
        "fp8": FP8(FP8Config(head="none"), context),
        "fp8, activations too": FP8(FP8Config(activations="fp8"), context),
        "int4": Int4(Int4Config(group_size=32), context),
    }


@pytest.mark.parametrize(
    "name",
    [
        "fp8, activations too",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("int8", "fp8", "int4", "int8, activations too")),
    ],
)  # fmt: skip
def test_quantized_models_give_the_logits_of_their_weights(checkpoints: dict[str, Path], name: str) -> None:
    """Each format through the fused kernels, and what takes over beyond 16 rows: activations are rounded only there."""
    chunks = CHUNKS[:1] if "activations" in name else FEWER_CHUNKS
    quantizer = quantizers()[name]
    facts, fast = load(checkpoints["qwen2"], kernels="triton", quantizer=quantizer)
    _, plain = load(checkpoints["qwen2"], kernels="reference", quantizer=quantizer)
    got, want = (chunked_logits(PagedLoop(facts, model), chunks) for model in (fast, plain))
    # A number rounded to 8 bits may fall on the other side of a middle: that shows in the third digit.
    assert float((got - want).abs().max()) <= (0.05 if "activations" in name else 3e-5) * float(want.abs().max())
    assert line(fast, "linear, add").startswith("linear, add: 1 to 16 rows: one Triton kernel: product, add; else: ")
    roundings = layer_launches(checkpoints["qwen2"], 17, quantizer).kernels.count("quantize_rows")
    assert roundings == (4 if "activations" in name else 0), "two norms, the attention's output and the gate's"


def shape(family: str, model_type: str, **options: Any) -> dict[str, Any]:
    return {
        "architectures": [f"{family}ForCausalLM"], "model_type": model_type, "vocab_size": 96, "hidden_size": 32,
        "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "max_position_embeddings": 128, "tie_word_embeddings": False, "head_dim": 8, "moe_intermediate_size": 24,
        **options,
    }  # fmt: skip


MIXTURES: dict[str, tuple[type[Any], dict[str, Any]]] = {
    "qwen3_moe": (QwenMoeArchitecture, shape("Qwen3Moe", "qwen3_moe", num_experts=16, num_experts_per_tok=2)),
    "gpt_oss": (
        GptOssArchitecture,
        shape("GptOss", "gpt_oss", num_local_experts=16, num_experts_per_tok=2, sliding_window=8),
    ),
    "deepseek_v3": (
        DeepseekArchitecture,
        shape(
            "DeepseekV3", "deepseek_v3", n_routed_experts=8, num_experts_per_tok=3, kv_lora_rank=16, q_lora_rank=12,
            qk_rope_head_dim=8, qk_nope_head_dim=12, v_head_dim=10, first_k_dense_replace=1, n_shared_experts=1,
            n_group=4, topk_group=2,
        ),
    ),
}  # fmt: skip


def mixture(family: str, rows: int, kernels: Kernels = "triton", layers: int = 2) -> RandomModel:
    """A decode step of ``rows`` sequences of 20 tokens."""
    architecture, config = MIXTURES[family]
    return random_model(
        architecture(SlotConfig()), config | {"num_hidden_layers": layers},
        lambda context: Unquantized(UnquantizedConfig(), context),
        lambda context: TritonAttention(SlotConfig(), context, num_sms=4), PlainFormat(), "float32", "cpu",
        kernels=kernels, rows=rows, tokens=20,
    )  # fmt: skip


@few(2)
@pytest.mark.parametrize(("family", "rows"), [("qwen3_moe", 1), ("gpt_oss", 1), ("gpt_oss", 3), ("deepseek_v3", 3)])
def test_mixtures_sinks_and_latent_attention_are_what_torch_makes_of_them(family: str, rows: int) -> None:
    found = []
    for kernels in ("triton", "reference"):
        made = mixture(family, rows, kernels)
        hidden, _ = made.model.run(made.batch, made.kv, made.prepared)
        found.append(made.model.head(hidden))
    assert float(found[1].abs().max()) > 1.0
    assert float((found[0] - found[1]).abs().max()) <= TOLERANCE["float32"]


@pytest.mark.parametrize("family", ["gpt_oss", "deepseek_v3"])
def test_a_layer_of_each_kind_launches_what_all_layers_do(family: str) -> None:
    """Every other layer has a window; the first one has no experts. One token, three, and two prompts."""
    made = mixture(family, 1, layers=4)
    layers = made.model.layers_of_each_kind
    assert len(layers) == 2
    tables = DeviceTables(3, 64, 0, BLOCK, "cpu", 96, len(made.batch.attention))
    for rows, length in ((1, 1), (3, 1), (2, 12)):
        batch = tables.inputs((StepRow(tables.nobody, 0, length),) * rows).forward
        whole = specialisations(partial(made.model.forward, batch, made.kv))
        few = specialisations(partial(made.model.run_apart, layers, batch, made.kv))
        assert set(whole) == set(few) and 1.5 * few.total() < whole.total()


def specialisations(run: Callable[[], object]) -> Counter[tuple[object, ...]]:
    """What kernels are compiled for, as far as the launches say: constants, and dtypes of tensors; and how often each
    is launched."""
    found, launch = Counter[tuple[object, ...]](), InterpretedFunction.run

    def noted(kernel: Any, *args: Any, grid: Any, warmup: bool, **constants: Any) -> Any:
        dtypes = tuple(arg.dtype if isinstance(arg, Tensor) else type(arg) for arg in args)
        found[kernel.fn.__name__, dtypes, tuple(sorted(constants.items(), key=itemgetter(0)))] += 1
        return launch(kernel, *args, grid=grid, warmup=warmup, **constants)

    with patch.object(InterpretedFunction, "run", noted):
        run()
    return found


QWEN3_ATTENTION = ["linear_store", "norm_rope_write", "split_attention", "linear_store"]
GPT_OSS_ATTENTION = ["linear_rope_write", "split_attention", "linear_store"]
FEW_PAIRS = ["choose_experts", "expert_gate", "expert_mix"]
MANY_PAIRS = ["choose_experts", "sort_pairs", "aten.index_select", "expert_gate", "expert_down", "mix_rows"]


@few(2)
@pytest.mark.parametrize(
    ("family", "rows", "names"),
    [
        ("qwen3_moe", 1, [*QWEN3_ATTENTION, *FEW_PAIRS]),
        ("qwen3_moe", 2, [*QWEN3_ATTENTION, *FEW_PAIRS]),
        ("qwen3_moe", 3, [*QWEN3_ATTENTION, *MANY_PAIRS]),
        ("gpt_oss", 1, [*GPT_OSS_ATTENTION, *FEW_PAIRS]),
        ("gpt_oss", 3, [*GPT_OSS_ATTENTION, *MANY_PAIRS]),
    ],
)
def test_a_layer_with_experts_is_six_or_seven_launches_and_three_more_where_pairs_are_sorted(
    family: str, rows: int, names: list[str]
) -> None:
    layer = mixture(family, rows).layer(1)
    layer()
    with count_launches() as launches:
        layer()
    assert launches.names == ["aten.clone", *names], "the test itself copies what enters the layer"


def test_bytes_of_a_step_are_those_of_chosen_experts() -> None:
    """Of 16 experts 2 are read, and of 20 tokens 8 where a window passed the others."""
    made = mixture("gpt_oss", 1)
    hidden, inner, vocab, layers = 32, 48, 96, 2
    heads = 8 * (4 + 2 + 2)
    attention = hidden * heads + heads + 32 * hidden + hidden + 4
    experts = 2 * (3 * hidden * inner + 2 * inner + hidden)
    others = 16 * (hidden + 1) + 2 * hidden
    assert made.weight_bytes == 4 * (layers * (attention + experts + others) + hidden + hidden * vocab)
    assert made.kv_bytes == 4 * 2 * 2 * 8 * (8 + 20)
