"""Quantized checkpoints over several ranks: each reads its share of what is stored, and together they compute what one
rank does."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.families import model_facts, model_graph
from tests.kernels import tiny
from tests.plugins.quantizer.checkpoint import mixtures, test_mxfp4
from tests.plugins.quantizer.checkpoint.reference import LARGEST, reader
from tests.plugins.quantizer.checkpoint.test_experts import store_together
from tests.plugins.quantizer.checkpoint.writers import CASES, Case, awq, fp8, gptq, write_case
from tests.selection import few
from tools.benchmarks.ranks import communicator
from torch import Tensor

from engine.assembly.model_config import model_config
from engine.contracts.graph import Graph
from engine.contracts.model import ModelFacts
from engine.contracts.ops import AllGather, AllReduce, Linear, LinearSpec
from engine.contracts.quantizer import Quantizer
from engine.kernels.settings import Kernels
from engine.models.layout import Layout
from engine.models.record import facts, recorded
from engine.testing.paged_loop import PagedLoop, loaded
from engine.testing.ranks import Ranks, compare, logits, steps_of

SIZES: dict[str, Any] = {
    "hidden_size": 128, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 16, "intermediate_size": 160,
    "num_hidden_layers": 2,
}  # fmt: skip
"""Four groups of 32 in ``o_proj``, five in ``down_proj``."""
TEXTS = [[7 * i % 96 for i in range(23)], [11 * i % 96 for i in range(15)]]
STEPS = steps_of(TEXTS, (9, 1, 5))


def weights(sizes: dict[str, Any]) -> dict[str, Tensor]:
    """Of a Llama of these sizes."""
    generator = torch.Generator().manual_seed(4)

    def matrix(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator) * 0.15

    hidden, inner, head = sizes["hidden_size"], sizes["intermediate_size"], sizes["head_dim"]
    queries, keys = sizes["num_attention_heads"] * head, sizes["num_key_value_heads"] * head
    tensors = {name: matrix(120, hidden) for name in ("model.embed_tokens.weight", "lm_head.weight")}
    tensors["model.norm.weight"] = 1.0 + matrix(hidden)
    for i in range(sizes["num_hidden_layers"]):
        name = f"model.layers.{i}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{name}.{norm}.weight"] = 1.0 + matrix(hidden)
        shapes = {
            "self_attn.q": (queries, hidden), "self_attn.k": (keys, hidden), "self_attn.v": (keys, hidden),
            "self_attn.o": (hidden, queries), "mlp.gate": (inner, hidden), "mlp.up": (inner, hidden),
            "mlp.down": (hidden, inner),
        }  # fmt: skip
        tensors |= {f"{name}.{part}_proj.weight": matrix(*shape) for part, shape in shapes.items()}
    return tensors


def write(folder: Path, case: Case, **changes: Any) -> Path:
    sizes = SIZES | changes
    return write_case(folder, case, weights(sizes), tiny.CONFIG | sizes)[0]


def llama(folder: Path) -> tuple[ModelFacts, Graph]:
    return model_facts(str(folder)), model_graph(str(folder))


def mixture(folder: Path) -> tuple[ModelFacts, Graph]:
    architecture, config = mixtures.architecture_of(folder), model_config(str(folder))
    return facts(architecture, config), recorded(architecture, config)


def check(model: tuple[ModelFacts, Graph], quantizer: Quantizer, layout: Layout, kernels: Kernels = "torch") -> Ranks:
    """Returns the ranks, to look at what they hold."""
    want = logits(PagedLoop(loaded(*model, kernels, quantizer)), STEPS)
    with Ranks(*model, layout, communicator, kernels=kernels, quantizer=quantizer) as ranks:
        found = compare(want, ranks.logits(STEPS))
    assert found.is_one and found.drift <= LARGEST, found
    return ranks


FORMATS = (
    "ct fp8 tensor", "ct fp8 channel", "ct fp8 block", "ct int8 channel", "ct int8 channel asym", "ct w4 g32 sym",
    "ct w4 g32 asym", "ct w4 g16 actorder", "ct w4 g16 asym actorder", "ct w4 channel", "ct w8 g32 asym", "fp8 block",
    "fp8 tensor", "awq g32", "awq one group", "gptq w4 g32 sym", "gptq w4 g32 asym", "gptq w4 g16 asym desc_act",
    "gptq w4 one group, head", "gptq_v2 w8 g16 sym desc_act", "gptq w8 g32 asym",
)  # fmt: skip


@few(4)
@pytest.mark.parametrize("kernels", ["torch", pytest.param("native", marks=pytest.mark.slow)])
@pytest.mark.parametrize("tp", [pytest.param(2, marks=pytest.mark.slow), 4])
@pytest.mark.parametrize("name", FORMATS)
def test_ranks_compute_what_one_does(name: str, tp: int, kernels: Kernels, tmp_path: Path) -> None:
    """Five groups over two ranks, or four: some have one more."""
    folder = write(tmp_path, CASES[name])
    check(llama(folder), reader(folder), Layout(tp), kernels)


@pytest.mark.parametrize("tp", [2, 3, 4])
def test_blocks_that_sizes_are_no_multiples_of(tp: int, tmp_path: Path) -> None:
    """128 x 128: keys of 96 features are less than a block, 320 features between the layers two and a half, so two
    ranks have blocks of both kinds, and the last has half of one."""
    folder = write(tmp_path, BLOCKS, hidden_size=200, head_dim=128, num_attention_heads=4, intermediate_size=450)
    ranks = check(llama(folder), reader(folder), Layout(tp))
    assert [spec.in_features for spec in downs(ranks)] == {2: [256, 194], 3: [256, 128, 66], 4: [128, 128, 128, 66]}[tp]


def of_128(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    return fp8(weight, "block", (128, 128), "weight_scale_inv")


BLOCKS = replace(
    CASES["fp8 block"], quantization=CASES["fp8 block"].quantization | {"weight_block_size": [128, 128]}, write=of_128
)


def downs(ranks: Ranks) -> list[LinearSpec]:
    """The first layer's ``down_proj`` of each rank."""
    layers = [own.graph.layers[0].nodes for own in ranks.placed]
    found = [[node.op.spec for node in nodes if isinstance(node.op, Linear)] for nodes in layers]
    return [next(spec for spec in specs if "down_proj" in spec.parts[0].name) for specs in found]


def test_231_groups_over_two_ranks(tmp_path: Path) -> None:
    """As Qwen2-72B was first published, in small."""
    folder = write(tmp_path, gptq(4, 16, False, False, "gptq"), intermediate_size=231 * 16, num_hidden_layers=1)
    ranks = check(llama(folder), reader(folder), Layout(2))
    assert [spec.in_features // 16 for spec in downs(ranks)] == [116, 115]


@few(1)
@pytest.mark.parametrize("name", ["gptq w4 g16 asym desc_act", "ct w4 g16 asym actorder"])
def test_layers_in_activation_order_are_cut_along_their_outputs(name: str, tmp_path: Path) -> None:
    folder = write(tmp_path, CASES[name])
    for own in check(llama(folder), reader(folder), Layout(2)).placed:
        for layer in own.graph.layers:
            specs = [node.op.spec for node in layer.nodes if isinstance(node.op, Linear)]
            assert all(spec.share is not None and spec.share.columns is None for spec in specs)
            assert not any(isinstance(node.op, AllReduce) for node in layer.nodes)
            # Attention, what it is projected to, what gates made, and what that is projected to.
            assert [type(node.op) for node in layer.nodes].count(AllGather) == 4


def test_groups_that_do_not_lie_between_heads_leave_fewer_cuts(tmp_path: Path) -> None:
    folder = write(tmp_path, awq(64))
    quantizer = reader(folder)
    check(llama(folder), quantizer, Layout(2))
    said = r"parallelism.tp=4: .*q_proj: queries of different key heads share a scale; parallelism.tp=1, 2 would fit"
    with pytest.raises(ValueError, match=said):
        check(llama(folder), quantizer, Layout(4))


# -- experts

MIXTURES = ("ct fp8 channel", "ct fp8 block", "ct int8 channel", "ct w4 g32 asym", "fp8 block", "awq g32",
            "gptq w4 g32 sym", "gptq w8 g32 asym")  # fmt: skip
LAYOUTS = {"tp 2": Layout(2), "ep 2": Layout(2, 1, 2), "tp 4 x ep 2": Layout(4, 1, 2)}


@few(4)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kernels", ["torch", pytest.param("native", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", MIXTURES)
def test_experts_over_ranks(name: str, kernels: Kernels, layout: str, tmp_path: Path) -> None:
    """Cut inside, spread whole, or both. Heads of 16 between groups of 32 are cut in two at most."""
    folder, _ = mixtures.write_mixture(tmp_path, CASES[name], "mixtral" if "g32" in name else "qwen2_moe")
    refused = "tp 4" in layout and ("g32" in name or name == "fp8 block")
    with pytest.raises(ValueError, match="self_attn") if refused else nullcontext():
        check(mixture(folder), mixtures.reader(folder), LAYOUTS[layout], kernels)


@few(1)
@pytest.mark.parametrize("name", ["ct w4 g16 asym actorder", "gptq w4 g16 asym desc_act"])
def test_experts_in_activation_order_are_spread_whole(name: str, tmp_path: Path) -> None:
    folder, _ = mixtures.write_mixture(tmp_path, CASES[name])
    model, quantizer = mixture(folder), mixtures.reader(folder)
    check(model, quantizer, Layout(2, 1, 2))
    with pytest.raises(
        ValueError, match=r"down_proj: experts that are stored so cannot be cut; parallelism.ep spreads"
    ):
        check(model, quantizer, Layout(2))


@few(3)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kernels", ["torch", "native"])
def test_experts_in_mxfp4(layout: str, kernels: Kernels, tmp_path: Path) -> None:
    """Stored together, gates and ups in turns: 96 features are three groups, of which the first of two ranks has
    two."""
    folder, _ = test_mxfp4.write(tmp_path)
    model = mixture(folder)
    check(model, mixtures.reader(folder), LAYOUTS[layout], kernels)


@pytest.mark.parametrize("layout", ["tp 2", "ep 2"])
def test_blocks_of_experts_that_are_stored_together(layout: str, tmp_path: Path) -> None:
    folder, _ = mixtures.write_mixture(tmp_path, CASES["fp8 block"])
    store_together(folder)
    check(mixture(folder), mixtures.reader(folder), LAYOUTS[layout])


@pytest.mark.parametrize("layout", [Layout(2, 1, 2), Layout(3)])
def test_quantized_projections_of_heads(layout: Layout, tmp_path: Path) -> None:
    """Latent attention: ``kv_b_proj`` is cut between heads of 22 rows, in blocks of 32, and taken apart."""
    kept = ["o_proj", "mlp.gate"]
    quantization = CASES["fp8 block"].quantization | {"modules_to_not_convert": kept}
    case = replace(CASES["fp8 block"], quantization=quantization, left=("o_proj",))
    folder, _ = write_case(tmp_path, case, mixtures.weights("deepseek_v3"), mixtures.DEEPSEEK)
    check(mixture(folder), mixtures.reader(folder), layout)
