"""``tools/quantize`` writes what it says: the layout, the scales it folds, the errors it makes up for."""

import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.kernels import tiny  # noqa: E402
from tests.selection import few  # noqa: E402
from tools.quantize.__main__ import main as quantize  # noqa: E402
from tools.quantize.calibration import LayerRunner, Linear, Moments  # noqa: E402
from tools.quantize.folding import sites  # noqa: E402
from tools.quantize.gptq import aimed, gptq_codes  # noqa: E402
from tools.quantize.grid import Grid, levels, output_error  # noqa: E402
from tools.quantize.layer import Recipe, quantize_layer  # noqa: E402
from tools.quantize.ranges import output_ranges  # noqa: E402
from tools.quantize.run import load_source, norm_names  # noqa: E402
from tools.quantize.scaling import awq_scales  # noqa: E402
from tools.quantize.writer import pack  # noqa: E402
from tools.train_demo_model import source_texts  # noqa: E402

from engine.assembly.assemble import assemble  # noqa: E402
from engine.assembly.bind import bind  # noqa: E402
from engine.contracts.graph import Builder  # noqa: E402
from engine.contracts.ops import Gated, LinearPart  # noqa: E402
from engine.contracts.quantizer import QuantizedWeight  # noqa: E402
from engine.models.manifest import Manifest  # noqa: E402
from engine_lab.eval.forward import LoadedPlan  # noqa: E402

BUNDLED = ROOT / "core" / "engine" / "bundled"
TOKENS = tuple(torch.randint(0, 120, (40,), generator=torch.Generator().manual_seed(1)).tolist())
GROUP = 32


def with_extras(family):
    """A tiny checkpoint of a family: its biases and head norms too."""
    generator = torch.Generator().manual_seed(5)
    tensors = tiny.weights()
    for i in range(3):
        name = f"model.layers.{i}.self_attn"
        if family == "Qwen2ForCausalLM":
            for part, size in (("q", 64), ("k", 32), ("v", 32)):
                tensors[f"{name}.{part}_proj.bias"] = torch.randn(size, generator=generator) * 0.1
        if family == "Qwen3ForCausalLM":
            tensors |= {f"{name}.{part}_norm.weight": torch.rand(16, generator=generator) + 0.5 for part in "qk"}
    return tensors


FAMILIES = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")


@pytest.fixture(params=FAMILIES)
def model(request, tmp_path):
    """Grouped heads in each; a tokenizer whose ids a tiny vocabulary has."""
    folder = tmp_path / "model"
    folder.mkdir()
    tiny.write(folder, with_extras(request.param), architectures=[request.param], head_dim=16)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())[:120]
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, [], unk_token=letters[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture
def text(tmp_path):
    file = tmp_path / "calibration.txt"
    ids = torch.randint(0, 90, (2000,), generator=torch.Generator().manual_seed(2)).tolist()
    file.write_text("".join(chr(ord("!") + i) for i in ids))
    return str(file)


def logits(folder, *words):
    plan = assemble([f"model.path={folder}", "device=cpu", "model.dtype=float32", "execution=eager", *words])
    loaded = LoadedPlan(plan, bind(plan), context=64, chunk=64)
    return torch.cat(list(loaded.logits(loaded.hidden(TOKENS))))


def unpacked(words, bits, columns):
    """Codes of packed words, as the format describes them."""
    mask, per_word = (1 << bits) - 1, 32 // bits
    values = [(words.long() >> (bits * i)) & mask for i in range(per_word)]
    return torch.stack(values, dim=2).flatten(1)[:, :columns] - (1 << (bits - 1))


def dequantized(folder):
    """The float checkpoint a written one stands for."""
    stored, plain = load_file(folder / "model.safetensors"), {}
    for name, tensor in stored.items():
        if name.endswith(".weight_packed"):
            base = name.removesuffix(".weight_packed")
            out, inputs = stored[f"{base}.weight_shape"].tolist()
            codes, scale = unpacked(tensor, 4, inputs), stored[f"{base}.weight_scale"].float()
            zero = torch.zeros_like(scale)
            if f"{base}.weight_zero_point" in stored:
                zero = unpacked(stored[f"{base}.weight_zero_point"].T, 4, out).T.float()
            size = inputs // scale.shape[1]
            plain[f"{base}.weight"] = (codes - zero.repeat_interleave(size, 1)) * scale.repeat_interleave(size, 1)
        elif f"{name}_scale" in stored:
            plain[name] = tensor.float() * stored[f"{name}_scale"]
        elif not name.endswith(("_scale", "_shape", "_zero_point")):
            plain[name] = tensor
    return plain


def written(model, tmp_path, method, text, *flags):
    out = tmp_path / "out"
    words = [str(model), str(out), "--method", method, "--group-size", str(GROUP), "--sample-tokens", "64", *flags]
    words += [] if method in ("rtn", "fp8") else ["--text", text]
    assert quantize([*words, "--device", "cpu"]) == 0
    return out


METHODS = (
    ("rtn", []),
    ("rtn", ["--asymmetric"]),
    ("awq", []),
    ("awq", ["--no-asymmetric"]),
    ("gptq", []),
    ("awq+gptq", ["--asymmetric"]),
    ("smoothquant", []),
    ("fp8", []),
)
CHOSEN = [
    ("Qwen2ForCausalLM", *METHODS),
    ("LlamaForCausalLM", METHODS[0], METHODS[5]),
    ("Qwen3ForCausalLM", METHODS[2], METHODS[6]),
]
"""Every method on a family with biases, and those that fold scales into what is before on the others."""


def every_method():
    """All families and methods; slow but for those chosen."""
    quick = {(family, method, *flags) for family, *methods in CHOSEN for method, flags in methods}
    for family in FAMILIES:
        for method, flags in METHODS:
            marks = () if (family, method, *flags) in quick else pytest.mark.slow
            yield pytest.param(family, method, flags, marks=marks)


@few(2)
@pytest.mark.parametrize(("model", "method", "flags"), list(every_method()), indirect=["model"])
def test_the_engine_computes_what_the_written_numbers_stand_for(model, tmp_path, text, method, flags):
    out = written(model, tmp_path, method, text, *flags)
    plain = tmp_path / "plain"
    plain.mkdir()
    config = json.loads((model / "config.json").read_text())
    tiny.write(plain, {name: tensor.contiguous() for name, tensor in dequantized(out).items()}, **config)
    found, expected = logits(out, "quantizer.activations=bf16"), logits(plain)
    torch.testing.assert_close(found, expected, atol=2e-3, rtol=1e-3)
    assert float((expected - logits(model)).abs().max()) > 1e-3, "nothing was rounded"


@pytest.fixture(params=["of all experts", "of each expert"])
def mixture(request, tmp_path):
    """A tiny mixture of experts, with one tensor of all or one of each."""
    config = Qwen3MoeConfig(
        vocab_size=120, hidden_size=64, intermediate_size=96, moe_intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, max_position_embeddings=256, num_experts=4,
        num_experts_per_tok=2,
    )  # fmt: skip
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(config)
    folder = tmp_path / "mixture"
    model.save_pretrained(folder, save_original_format=request.param == "of each expert")
    stored = load_file(folder / "model.safetensors")
    assert any("experts.0." in name for name in stored) == (request.param == "of each expert")
    return folder


@few(2)
@pytest.mark.parametrize("method", ["rtn", "fp8"])
def test_experts_are_rounded_like_other_weights_and_routers_stay(mixture, tmp_path, method):
    out = written(mixture, tmp_path, method, None)
    plain = tmp_path / "plain"
    plain.mkdir()
    (plain / "config.json").write_text((mixture / "config.json").read_text())
    save_file({name: tensor.contiguous() for name, tensor in dequantized(out).items()}, plain / "model.safetensors")
    found, expected = logits(out, "quantizer.activations=bf16"), logits(plain)
    torch.testing.assert_close(found, expected, atol=2e-3, rtol=1e-3)
    assert float((expected - logits(mixture)).abs().max()) > 1e-4, "nothing was rounded"
    stored = load_file(out / "model.safetensors")
    suffix = "weight" if method == "fp8" else "weight_packed"
    assert f"model.layers.1.mlp.experts.3.down_proj.{suffix}" in stored
    assert not any(name.endswith("experts.gate_up_proj") for name in stored)
    section = json.loads((out / "config.json").read_text())["quantization_config"]
    assert section["ignore"] == ["lm_head", "model.layers.0.mlp.gate", "model.layers.1.mlp.gate"]


def test_methods_that_look_at_inputs_refuse_experts(mixture, tmp_path, text, capsys):
    assert quantize([str(mixture), str(tmp_path / "out"), "--method", "gptq", "--text", text, "--device", "cpu"]) == 2
    says = capsys.readouterr().err
    assert "has experts" in says and "use --method rtn or fp8" in says


def test_the_configuration_names_the_format_and_the_tokenizer_comes_along(model, tmp_path, text):
    out = written(model, tmp_path, "gptq", text)
    section = json.loads((out / "config.json").read_text())["quantization_config"]
    assert (section["quant_method"], section["format"]) == ("compressed-tensors", "pack-quantized")
    weights = section["config_groups"]["group_0"]["weights"]
    wanted = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP}
    assert weights.items() >= (wanted | {"actorder": "weight"}).items()
    assert section["ignore"] == ["lm_head"]
    assert (out / "tokenizer.json").read_bytes() == (model / "tokenizer.json").read_bytes()
    with safe_open(out / "model.safetensors", "pt") as file:
        name = "model.layers.0.mlp.down_proj"
        assert {key.removeprefix(f"{name}.") for key in file.keys() if key.startswith(name)} == {  # noqa: SIM118
            "weight_packed",
            "weight_scale",
            "weight_shape",
        }
        assert file.get_tensor(f"{name}.weight_packed").shape == (64, 96 // 8)
        assert file.get_tensor(f"{name}.weight_scale").shape == (64, 96 // GROUP)


@few(3)
@pytest.mark.parametrize(
    ("method", "flags", "symmetric"),
    [("awq", [], False), ("awq", ["--no-asymmetric"], True), ("rtn", [], True), ("rtn", ["--asymmetric"], False)],
)
def test_only_awq_has_zero_points_unless_told_otherwise(model, tmp_path, text, method, flags, symmetric):
    out = written(model, tmp_path, method, text, *flags)
    section = json.loads((out / "config.json").read_text())["quantization_config"]
    assert section["config_groups"]["group_0"]["weights"]["symmetric"] is symmetric
    zeros = [name for name in load_file(out / "model.safetensors") if name.endswith(".weight_zero_point")]
    assert bool(zeros) is not symmetric


def test_scales_that_are_folded_in_change_nothing(model):
    """With arbitrary scales and no rounding: norms, values and up rows divide what the next weights multiply."""
    source = load_source(str(model), "cpu")
    generator = torch.Generator().manual_seed(0)
    kv_format = bind(source.plan).kv_format
    runner = LayerRunner(source.plan.model, source.model, kv_format, [TOKENS], "float32", "cpu")
    with torch.inference_mode():
        for block in source.graph.layers:
            norms = {name: source.checkpoint.read(name) for name in norm_names(block)}
            before = dict(norms)
            found = sites(source.graph, block, source.linears, norms)
            assert [block.nodes[index].op.spec.parts[0].name.rpartition(".")[2] for index in found] == [
                "q_proj",
                "o_proj",
                "gate_proj",
                "down_proj",
            ]
            for site in found.values():
                wanted = site.share(torch.rand(site.linear.spec.in_features, generator=generator) + 0.5)
                site.linear.weight = site.linear.weight * site.fold(wanted)
            assert sum(not torch.equal(norms[name], before[name]) for name in norms) == 2
        for layer in range(len(source.graph.layers)):
            runner.advance(layer, slice(None))
        found = source.model.head(runner._exact[0][source.graph.hidden])
    torch.testing.assert_close(found, logits(model, "attention_kernel=torch"), atol=1e-4, rtol=1e-3)


def test_what_is_added_to_the_residual_stream_makes_up_for_what_it_lacks(model):
    drifts = {}

    class Watched(LayerRunner):
        def moments(self, linear, reads, added_to):
            found = super().moments(linear, reads, added_to)
            drifts[linear.spec.parts[0].name] = bool(found.drift.any())
            return found

    source = load_source(str(model), "cpu")
    runner = Watched(source.plan.model, source.model, bind(source.plan).kv_format, [TOKENS], "float32", "cpu")
    recipe = Recipe("gptq", Grid(4, GROUP, True, torch.float32))
    with torch.inference_mode():
        for layer in range(2):
            quantize_layer(layer, source.graph, source.linears, {}, recipe, runner)
    adds = {f"model.layers.{layer}.{name}" for layer in range(2) for name in ("self_attn.o_proj", "mlp.down_proj")}
    exact_yet = "model.layers.0.self_attn.o_proj"  # nothing before it is rounded
    assert {name for name, drifted in drifts.items() if drifted} == adds - {exact_yet}


SIZE = 8


def folded(record):
    """The linear layers of a layer that scales fold into what comes before, and its norms with scales of 2 folded."""
    b = Builder()
    x = b.embed("embed", 10, SIZE)
    with b.layer(x):
        x = record(b, x)
    b.lm_head(x, "head", 10)
    graph = b.graph()
    ones = ((spec, torch.ones(spec.out_features, spec.in_features)) for spec in Manifest().layers(graph))
    held = {spec.parts[0].name: Linear(spec, weight, None) for spec, weight in ones}
    norms = {name: torch.ones(SIZE) for name in norm_names(graph.layers[0])}
    found = sites(graph, graph.layers[0], held, norms)
    for site in found.values():
        site.fold(torch.full((site.linear.spec.in_features,), 2.0))
    names = {graph.layers[0].nodes[index].op.spec.parts[0].name for index in found}
    return names, held, {name: float(weight[0]) for name, weight in norms.items()}


def proj(name, size=SIZE):
    return LinearPart(name, size)


def test_without_a_norm_before_them_projections_keep_their_inputs():
    """Norms after the linear layers, as OLMo 2 has them: only values and up take scales."""

    def record(b, x):
        q, k, v = b.linear(x, proj("q"), proj("k"), proj("v"))
        x = b.add(x, b.rms_norm(b.linear(b.attention(q, k, v, 4), proj("o")), "after_attention", 1e-5))
        gate, up = b.linear(x, proj("gate"), proj("up"))
        return b.add(x, b.rms_norm(b.linear(b.gated(gate, up, "silu"), proj("down")), "after_mlp", 1e-5))

    names, held, norms = folded(record)
    assert names == {"o", "down"} and set(norms.values()) == {1.0}
    assert held["q"].weight[:, 0].tolist() == [1.0] * 2 * SIZE + [0.5] * SIZE
    assert held["gate"].weight[:, 0].tolist() == [1.0] * SIZE + [0.5] * SIZE


def test_a_norm_that_two_layers_read_takes_no_scales():
    def record(b, x):
        h = b.rms_norm(x, "shared", 1e-5)
        return b.add(x, b.add(b.linear(h, proj("one")), b.linear(h, proj("other"))))

    assert folded(record)[0] == set()


def test_a_norm_with_a_bias_or_of_heads_or_without_a_weight_takes_no_scales():
    norms = (
        lambda b, x: b.layer_norm(x, "norm", 1e-5, bias=True),
        lambda b, x: b.rms_norm(x, "norm", 1e-5, size=SIZE // 2),
        lambda b, x: b.rms_norm(x, None, 1e-5),
    )
    for norm in norms:
        assert folded(lambda b, x, norm=norm: b.add(x, b.linear(norm(b, x), proj("one"))))[0] == set()


def test_a_norm_that_is_stored_less_an_offset_takes_scales_of_the_sum():
    names, _, norms = folded(lambda b, x: b.add(x, b.linear(b.rms_norm(x, "norm", 1e-5, offset=1.0), proj("one"))))
    assert names == {"one"} and norms == {"norm.weight": 0.0}, "1 + 0 is half of 1 + 1"


def test_values_take_no_scales_where_something_else_is_done_with_them():
    def normed(b, x):
        q, k, v = b.linear(x, proj("q"), proj("k"), proj("v"))
        return b.add(x, b.linear(b.attention(q, k, b.rms_norm(v, "v_norm", 1e-5), 4), proj("o")))

    def keys_too(b, x):
        q, kv = b.linear(x, proj("q"), proj("kv"))
        return b.add(x, b.linear(b.attention(q, kv, kv, 4), proj("o")))

    def latent(b, x):
        q, k = b.linear(x, proj("q"), proj("k"))
        return b.add(x, b.linear(b.latent_attention(q, k, SIZE, scale=1.0), proj("o")))

    for record in (normed, keys_too, latent):
        assert folded(record)[0] == set()


def test_scales_go_through_what_multiplies_each_feature_by_itself():
    def record(b, x):
        q, k, v, gate = b.split(x, LinearPart("qkvg", 4 * SIZE, slices=(SIZE,) * 4))
        return b.add(x, b.linear(b.gate(b.scale(b.attention(q, k, v, 4), 0.5), gate), proj("o")))

    names, held, _ = folded(record)
    assert names == {"o"}
    assert held["qkvg"].weight[:, 0].tolist() == [1.0] * 2 * SIZE + [0.5] * SIZE + [1.0] * SIZE


@pytest.mark.parametrize("options", [{"offset": 1.0}, {"limit": 7.0}])
def test_ups_that_are_cut_or_moved_take_no_scales(options):
    def record(b, x):
        gate, up = b.linear(x, proj("gate"), proj("up"))
        return b.add(x, b.linear(b.gated(gate, up, Gated("silu", **options)), proj("down")))

    assert folded(record)[0] == set()


def test_a_gate_that_is_its_own_factor_takes_no_scales():
    def record(b, x):
        gate = b.linear(x, proj("gate"))
        return b.add(x, b.linear(b.gated(gate, gate, "silu"), proj("down")))

    assert folded(record)[0] == set()


def problem(rows=300, inputs=64, out=48):
    """Correlated inputs and a weight."""
    generator = torch.Generator().manual_seed(0)
    mix = torch.randn(inputs, inputs, generator=generator)
    x = torch.randn(rows, inputs, generator=generator) @ mix * torch.linspace(0.2, 3.0, inputs)
    return x, torch.randn(out, inputs, generator=generator)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("by_activation", [True, False])
def test_gptq_loses_less_and_half_with_large_inputs_first(symmetric, by_activation):
    x, weight = problem()
    hessian = x.T @ x
    found = levels(weight, Grid(4, 32, symmetric, torch.float32), None)
    codes = gptq_codes(weight, found, hessian, by_activation=by_activation, damping=0.01)
    assert codes.min() >= -8 and codes.max() <= 7 and torch.equal(codes, codes.round())
    nearest = output_error(found.dense(found.rounded(weight)) - weight, hessian)
    bound = 0.5 if by_activation else 0.9
    assert output_error(found.dense(codes) - weight, hessian) < bound * nearest


def test_an_input_that_is_always_zero_costs_nothing():
    x, weight = problem()
    x[:, 5] = 0
    found = levels(weight, Grid(4, 32, True, torch.float32), None)
    codes = gptq_codes(weight, found, x.T @ x, by_activation=True, damping=0.01)
    assert torch.isfinite(codes).all()


@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16, torch.float32])
def test_weights_that_are_all_zero_have_a_scale_that_can_be_stored(stored):
    x, weight = problem()
    weight[3, :32] = 0
    found = levels(weight, Grid(4, 32, False, stored), None)
    assert float(found.scale.min()) > 0 and torch.equal(found.scale.to(stored).float(), found.scale)
    codes = gptq_codes(weight, found, x.T @ x, by_activation=True, damping=0.01)
    assert torch.isfinite(codes).all()


def test_a_clip_that_looks_at_the_outputs_is_no_worse_there():
    x, weight = problem()
    hessian, grid = x.T @ x, Grid(4, 64, True, torch.float32)
    blind, seeing = (levels(weight, grid, seen) for seen in (None, hessian))
    errors = [output_error(found.dense(found.rounded(weight)) - weight, hessian) for found in (blind, seeing)]
    assert errors[1] <= errors[0]


def nearest_error(found, weight, hessian):
    return output_error(found.dense(found.rounded(weight)) - weight, hessian)


@pytest.mark.parametrize("symmetric", [True, False])
def test_with_large_channels_awq_loses_at_most_half(symmetric):
    """Four channels of 128 that are 30 times as large; the same grid for both, so that scales and ranges are judged."""
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(400, 128, generator=generator), torch.randn(48, 128, generator=generator)
    x[:, [3, 40, 77, 90]] *= 30.0
    hessian, grid = x.T @ x, Grid(4, 64, symmetric, torch.bfloat16)
    blind = nearest_error(levels(weight, grid, None), weight, hessian)
    scales = awq_scales(weight, grid, hessian, x.abs().mean(dim=0), lambda values: values)
    scaled, seen = weight * scales, hessian / (scales[:, None] * scales)
    both = nearest_error(output_ranges(scaled, grid, seen, scaled @ seen), scaled, seen)
    assert both < 0.5 * blind
    assert both < 0.9 * nearest_error(output_ranges(weight, grid, hessian, weight @ hessian), weight, hessian)


@pytest.mark.parametrize("symmetric", [True, False])
def test_ranges_chosen_beside_each_other_lose_less_than_each_alone(symmetric):
    x, weight = problem()
    hessian, grid = x.T @ x, Grid(4, 32, symmetric, torch.bfloat16)
    alone, together = levels(weight, grid, hessian), output_ranges(weight, grid, hessian, weight @ hessian)
    assert torch.equal(together.scale.to(torch.bfloat16).float(), together.scale), "as it will be read back"
    assert torch.equal(together.zero, together.zero.round()) and together.zero.min() >= -8 and together.zero.max() <= 7
    assert nearest_error(together, weight, hessian) < 0.9 * nearest_error(alone, weight, hessian)


def test_ranges_aim_at_the_output_that_is_wanted():
    """Inputs that came out a tenth too small: the ranges grow."""
    x, weight = problem()
    z, grid = 0.9 * x, Grid(4, 32, True, torch.float32)
    hessian = z.T @ z
    aiming = output_ranges(weight, grid, hessian, weight @ (x.T @ z))
    own = output_ranges(weight, grid, hessian, weight @ hessian)
    errors = [float((z @ found.dense(found.rounded(weight)).T - x @ weight.T).norm()) for found in (aiming, own)]
    assert errors[0] < 0.9 * errors[1]


def test_a_layer_makes_up_for_the_errors_before_it():
    x, weight = problem()
    generator = torch.Generator().manual_seed(1)
    z = x @ (torch.eye(64) + 0.1 * torch.randn(64, 64, generator=generator))
    drift = 0.3 * z @ torch.randn(64, 48, generator=generator)
    moments = Moments(z.T @ z, x.T @ z, drift.T @ z)
    target = x @ weight.T + drift
    better = aimed(weight, moments, damping=1e-6)
    assert float((z @ better.T - target).norm()) < 0.02 * float((z @ weight.T - target).norm())


def test_without_errors_before_it_a_layer_keeps_its_weight():
    x, weight = problem()
    moments = Moments(x.T @ x, x.T @ x, torch.zeros(48, 64))
    torch.testing.assert_close(aimed(weight, moments, 0.01), weight)


@pytest.mark.parametrize("bits", [4, 8])
def test_packing_is_undone_by_the_description_of_the_format(bits):
    low, high = -(1 << (bits - 1)), (1 << (bits - 1)) - 1
    codes = torch.randint(low, high + 1, (5, 19), generator=torch.Generator().manual_seed(0)).to(torch.int8)
    assert torch.equal(unpacked(pack(codes, bits), bits, 19), codes.long())


def test_an_int8_head_is_untied_and_read_back(tmp_path):
    out = tmp_path / "out"
    assert quantize(["bundled", str(out), "--method", "rtn", "--head", "int8", "--device", "cpu"]) == 0
    config = json.loads((out / "config.json").read_text())
    assert config["tie_word_embeddings"] is False and config["quantization_config"]["ignore"] == []
    stored = load_file(out / "model.safetensors")
    codes = unpacked(stored["lm_head.weight_packed"], 8, 256)
    original = load_file(BUNDLED / "model.safetensors")["model.embed_tokens.weight"].float()
    held = QuantizedWeight(codes.to(torch.int8), stored["lm_head.weight_scale"].float(), 256)
    assert torch.equal(codes.float(), (original / held.scale).round().clamp(-128, 127)), "nearest with the stored scale"
    assert float((held.dense() - original).norm() / original.norm()) < 0.02
    assert logits(out).shape == (len(TOKENS), 4096)


def test_the_text_that_judges_is_in_no_source_file_of_the_training_set():
    held = (BUNDLED / "heldout.txt").read_text()
    trained = "\n".join(source_texts())
    passages = [held[i : i + 200] for i in range(0, len(held), 200)]
    assert len(passages) > 300 and not any(passage in trained for passage in passages)


def test_nothing_is_overwritten_and_a_failure_leaves_nothing(tmp_path, capsys):
    taken = tmp_path / "taken"
    taken.mkdir()
    assert quantize(["bundled", str(taken), "--method", "rtn"]) == 2
    assert "nothing is overwritten" in capsys.readouterr().err
    for words, says in (
        (["--method", "gptq"], "needs calibration text"),
        (["--method", "rtn", "--group-size", "100"], "do not divide"),
        (["--method", "fp8", "--alpha", "2"], "from 0 to 1"),
    ):
        assert quantize(["bundled", str(tmp_path / "out"), *words, "--device", "cpu"]) == 2
        assert says in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]
