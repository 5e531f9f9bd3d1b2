"""How many requests fit is decided by the ledger that serving starts with."""

import json
import struct
from dataclasses import replace

import pytest
import torch
from tests.kernels import tiny
from tests.selection import few

from engine.assembly.assemble import assemble
from engine.assembly.bind import bind
from engine.models.record import recorded
from engine.startup.memory.estimate import estimate_memory
from engine.startup.memory.weights import quantized_bytes, weight_sizes
from engine_lab.eval.options import EvalOptions, Limits
from engine_lab.eval.plans import contestants
from engine_lab.shared.capacity import capacity_of
from engine_lab.shared.stated import bind_stated

GIB = 2**30
QWEN3_32B = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "attention_bias": False,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 5120,
    "intermediate_size": 25600,
    "max_position_embeddings": 40960,
    "num_attention_heads": 64,
    "num_hidden_layers": 64,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 151936,
}


def options(path, *compare, memory=80 * GIB):
    return EvalOptions(
        overrides=(f"model.path={path}",),
        compare=tuple((word,) if word else () for word in compare),
        config_dirs=(),
        reference=None,
        reference_dtype=None,
        text=None,
        jsonl=None,
        questions=None,
        context=1024,
        stride=1024,
        chunk=1024,
        tokens=None,
        match="exact",
        answer_tokens=64,
        limits=Limits(),
        json_file=None,
        capacity_only=True,
        requests_of=4096,
        memory=memory,
        cuda_capability=(9, 0),
    )


@pytest.fixture
def qwen(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_32B))
    return tmp_path


def on_card(path, *compare):
    plans = [one.plan for one in contestants(options(path, *compare))]
    return [capacity_of(plan, bind_stated(plan), 80 * GIB, 4096) for plan in plans]


def test_qwen3_32b_in_four_bits_serves_five_times_the_requests_on_80_gib(qwen):
    bf16, int4, fp8_kv = on_card(qwen, "", "quantizer=int4", "kv_format=fp8")
    assert bf16.weights / GIB == pytest.approx(61.03, abs=0.01)
    assert 16.5 < int4.weights / GIB < 18.5
    assert bf16.kv_per_token == 2 * 64 * 8 * 128 * 2 and fp8_kv.kv_per_token == bf16.kv_per_token / 2
    # One request of 4,096 tokens is exactly 1 GiB of bfloat16 keys and values.
    for found in (bf16, int4):
        assert found.requests == (found.budget - found.weights - found.beside) // GIB
    assert fp8_kv.requests in (2 * bf16.requests, 2 * bf16.requests + 1)


@few(2)
@pytest.mark.parametrize(("name", "bits"), [("int8", 8), ("fp8", 8), ("int4", 4)])
@pytest.mark.parametrize("tied", [False, True])
def test_what_weights_would_take_in_fewer_bits_is_known_without_the_quantizer(tmp_path, name, bits, tied):
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_32B | {"tie_word_embeddings": tied, "num_hidden_layers": 8}))
    (plan,) = [one.plan for one in contestants(options(tmp_path, f"quantizer={name}"))]
    bound = bind_stated(plan)
    about = quantized_bytes(recorded(bound.architecture, plan.model), torch.bfloat16, bits)
    assert 1 <= about / capacity_of(plan, bound, 80 * GIB, 4096).weights < 1.1


def headers_only(folder, shapes):
    """A safetensors file of the right size without a byte of data."""
    header, end = {}, 0
    for name, shape in shapes.items():
        size = 2
        for length in shape:
            size *= length
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)


def test_a_configuration_alone_says_what_headers_say(tmp_path):
    config = tiny.CONFIG | {"torch_dtype": "bfloat16", "max_position_embeddings": 4096}
    (tmp_path / "config.json").write_text(json.dumps(config))
    plan = assemble([f"model.path={tmp_path}", "device=cpu"])
    alone = capacity_of(plan, bind(plan), GIB, 100)
    headers_only(tmp_path, {name: tensor.shape for name, tensor in tiny.weights().items()})
    assert capacity_of(plan, bind(plan), GIB, 100) == alone and alone.requests > 0


def test_one_more_request_than_the_answer_would_not_fit(tmp_path):
    plan = assemble([f"model.path={tiny.write(tmp_path)}", "device=cpu"])
    bound = bind(plan)
    from engine.checkpoint.tensors import open_checkpoint

    found = capacity_of(plan, bound, 40 * 2**20, 100)
    sizes = weight_sizes(plan, bound, open_checkpoint(plan.model.path))
    assert found.requests > 1

    def peak(requests):
        choice = plan.choice("scheduler")
        wider = replace(choice, config={**choice.config, "max_requests": requests})
        variant = replace(plan, max_len=100, slots={**plan.slots, "scheduler": (wider,)})
        estimate = estimate_memory(variant, sizes, bound)
        return estimate.total(requests * -(-100 // estimate.pool.block_size) + 1)

    assert peak(found.requests) <= found.budget < peak(found.requests + 1)


def test_what_does_not_fit_at_all_serves_nobody(tmp_path):
    plan = assemble([f"model.path={tiny.write(tmp_path)}", "device=cpu"])
    assert capacity_of(plan, bind(plan), 2**20, 100).requests == 0
    with pytest.raises(ValueError, match="256 positions"):
        capacity_of(plan, bind(plan), GIB, 257)
