"""Write a Llama or Qwen3-MoE checkpoint as GGUF, to measure llama.cpp on the same shapes. Needs gguf, safetensors and
torch.

    python tools/benchmarks/make_gguf.py MODEL OUT.gguf --type bf16|q8_0|q4_0

The vocabulary stays behind: tokens go in and come out as ids, or, with ``--vocabulary``, as bytes and made-up words, so
that llama.cpp's server can be asked. With ``q4_0`` the embedding, which a tied model also uses
as its head, is stored in 8 bits.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

TYPES = {
    "bf16": gguf.GGMLQuantizationType.BF16,
    "q8_0": gguf.GGMLQuantizationType.Q8_0,
    "q4_0": gguf.GGMLQuantizationType.Q4_0,
}
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate": "ffn_gate_inp",
    "mlp.experts.gate_proj": "ffn_gate_exps",
    "mlp.experts.up_proj": "ffn_up_exps",
    "mlp.experts.down_proj": "ffn_down_exps",
}
FAMILIES = {"llama": "llama", "qwen3_moe": "qwen3moe"}
"""``model_type`` -> llama.cpp's name."""


def gguf_name(name: str) -> str:
    """``model.layers.3.mlp.up_proj.weight`` -> ``blk.3.ffn_up.weight``."""
    stem, _, suffix = name.rpartition(".")
    if stem.startswith("model.layers."):
        _, _, layer, part = stem.split(".", 3)
        return f"blk.{layer}.{NAMES[part]}.{suffix}"
    return f"{NAMES[stem]}.{suffix}"


def in_pairs(weight: Tensor, heads: int) -> Tensor:
    """llama.cpp rotates neighbouring elements of a head, Hugging Face the two halves."""
    halves = weight.reshape(heads, 2, -1, weight.shape[1])
    return halves.transpose(1, 2).reshape(weight.shape)


def tensors(model: Path) -> Iterator[tuple[str, Tensor]]:
    """All of a checkpoint, with the experts of a layer in one: ``[num_experts, out, in]``."""
    stored = load_file(model / "model.safetensors")
    experts: dict[str, dict[int, Tensor]] = {}
    for name, tensor in stored.items():
        if found := re.fullmatch(r"(.*\.mlp\.experts)\.(\d+)(\..*)", name):
            experts.setdefault(found[1] + found[3], {})[int(found[2])] = tensor
        else:
            yield name, tensor
    for name, by_number in experts.items():
        yield name, torch.stack([by_number[number] for number in range(len(by_number))])


def add_vocabulary(writer: gguf.GGUFWriter, size: int) -> None:
    """Three special tokens, the bytes, and words of numbers."""
    special, words = ("<unk>", "<s>", "</s>"), size - 259
    writer.add_tokenizer_model("llama")
    writer.add_token_list([*special, *(f"<0x{byte:02X}>" for byte in range(256)), *(f"▁w{i}" for i in range(words))])
    writer.add_token_scores([-float(i) for i in range(size)])
    kinds = gguf.TokenType
    writer.add_token_types([kinds.UNKNOWN, kinds.CONTROL, kinds.CONTROL, *[kinds.BYTE] * 256, *[kinds.NORMAL] * words])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--type", choices=TYPES, default="bf16")
    parser.add_argument("--vocabulary", action="store_true", help="made-up words, for a server")
    options = parser.parse_args()
    config = json.loads((options.model / "config.json").read_text())
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    family = FAMILIES[config["model_type"]]
    writer = gguf.GGUFWriter(options.out, family)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(
        config["rope_theta"] if "rope_theta" in config else config["rope_parameters"]["rope_theta"]
    )
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    if family == "qwen3moe":
        writer.add_expert_count(config["num_experts"] if "num_experts" in config else config["num_local_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_vocab_size(config["vocab_size"])
    if options.vocabulary:
        add_vocabulary(writer, config["vocab_size"])
    else:
        writer.add_tokenizer_model("no_vocab")
    for name, tensor in tensors(options.model):
        if family == "llama" and ("q_proj" in name or "k_proj" in name):
            tensor = in_pairs(tensor, heads if "q_proj" in name else kv_heads)
        data = tensor.float().numpy()
        kind = TYPES[options.type]
        if data.ndim == 1 or ".mlp.gate." in name:
            kind = gguf.GGMLQuantizationType.F32
        elif "embed_tokens" in name and options.type == "q4_0":
            kind = TYPES["q8_0"]
        packed = gguf.quants.quantize(np.ascontiguousarray(data), kind)
        writer.add_tensor(gguf_name(name), packed, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    main()
