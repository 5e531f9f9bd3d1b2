"""Write a Llama or Qwen3-MoE checkpoint with random weights in Hugging Face layout, for measuring speed.

    python tools/make_random_model.py /path/to/model            # the "0.5B shape": 386M parameters, bfloat16
    python tools/make_random_model.py /path/to/model --layers 2 --dtype float32
    python tools/make_random_model.py /path/to/model --layers 16 --hidden 1024 --heads 16 --kv-heads 4 \\
        --experts 64 --top-k 8 --ffn 320                        # 1.1B parameters, of which a token reads 0.2B
    python tools/make_random_model.py /path/to/model --config config.json      # of any family that the engine has

The tokenizer maps every id to some text, so that any sampled token can be decoded: bytes first, then made-up words.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

from engine.assembly.assemble import assemble
from engine.assembly.bind import bind
from engine.models.manifest import Manifest

SPECIAL = ("<unk>", "<s>", "</s>")


LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "tie_word_embeddings": True}


def with_experts(arguments: argparse.Namespace) -> dict[str, Any]:
    """What ``config.json`` of a Qwen3-MoE has beside what a Llama has, or instead."""
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_experts": arguments.experts,
        "num_experts_per_tok": arguments.top_k,
        "moe_intermediate_size": arguments.ffn,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "tie_word_embeddings": False,
    }


def config(arguments: argparse.Namespace) -> dict[str, Any]:
    """``config.json`` of the model."""
    return {
        **(with_experts(arguments) if arguments.experts else LLAMA),
        "hidden_size": arguments.hidden,
        "num_hidden_layers": arguments.layers,
        "num_attention_heads": arguments.heads,
        "num_key_value_heads": arguments.kv_heads,
        "head_dim": arguments.hidden // arguments.heads,
        "intermediate_size": arguments.ffn,
        "vocab_size": arguments.vocab,
        "max_position_embeddings": arguments.context,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": arguments.dtype,
    }


def tensors(facts: dict[str, Any], dtype: torch.dtype, seed: int) -> Iterator[tuple[str, Tensor]]:
    """Normal weights, scaled so that activations keep their size through the layers."""
    generator = torch.Generator().manual_seed(seed)
    hidden, ffn, experts = facts["hidden_size"], facts["intermediate_size"], facts.get("num_experts", 0)
    kv_size = facts["num_key_value_heads"] * facts["head_dim"]
    q_size = facts["num_attention_heads"] * facts["head_dim"]

    def linear(rows: int, columns: int) -> Tensor:
        return (torch.randn(rows, columns, generator=generator) * columns**-0.5).to(dtype)

    yield "model.embed_tokens.weight", linear(facts["vocab_size"], hidden)
    yield "model.norm.weight", torch.ones(hidden, dtype=dtype)
    if experts:
        yield "lm_head.weight", linear(facts["vocab_size"], hidden)
    for i in range(facts["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        yield f"{layer}.input_layernorm.weight", torch.ones(hidden, dtype=dtype)
        yield f"{layer}.post_attention_layernorm.weight", torch.ones(hidden, dtype=dtype)
        yield f"{layer}.self_attn.q_proj.weight", linear(q_size, hidden)
        yield f"{layer}.self_attn.k_proj.weight", linear(kv_size, hidden)
        yield f"{layer}.self_attn.v_proj.weight", linear(kv_size, hidden)
        yield f"{layer}.self_attn.o_proj.weight", linear(hidden, q_size)
        for part in "qk" if experts else "":
            yield f"{layer}.self_attn.{part}_norm.weight", torch.ones(facts["head_dim"], dtype=dtype)
        if experts:
            yield f"{layer}.mlp.gate.weight", linear(experts, hidden)
        for mlp in [f"{layer}.mlp.experts.{e}" for e in range(experts)] or [f"{layer}.mlp"]:
            yield f"{mlp}.gate_proj.weight", linear(ffn, hidden)
            yield f"{mlp}.up_proj.weight", linear(ffn, hidden)
            yield f"{mlp}.down_proj.weight", linear(hidden, ffn)


def tensors_of_family(folder: Path, dtype: torch.dtype, seed: int) -> Iterator[tuple[str, Tensor]]:
    """Those of the ``config.json`` in a folder: matrices as above, all else ones."""
    plan = assemble([f"model.path={folder}", "device=cpu", "exporter=[]"])
    generator = torch.Generator().manual_seed(seed)
    for tensor in Manifest().tensors(bind(plan).graph):
        shape = tensor.shape
        assert shape is not None
        is_matrix = len(shape) > 1
        weight = torch.randn(shape, generator=generator) * shape[-1] ** -0.5 if is_matrix else torch.ones(shape)
        yield tensor.name, weight.to(dtype)


def tokenizer(vocab_size: int) -> Tokenizer:
    """Byte-level BPE without merges: the alphabet, then words nobody types, up to ``vocab_size``."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = [*SPECIAL, *alphabet]
    names += [f"Ġw{i}" for i in range(vocab_size - len(names))]
    result = Tokenizer(models.BPE({name: i for i, name in enumerate(names[:vocab_size])}, [], unk_token="<unk>"))
    result.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    result.decoder = decoders.ByteLevel()
    result.add_special_tokens(list(SPECIAL))
    return result


def write_model(folder: Path, arguments: argparse.Namespace) -> int:
    """Write everything; returns the number of parameters."""
    folder.mkdir(parents=True, exist_ok=True)
    facts = json.loads(arguments.config.read_text()) if arguments.config else config(arguments)
    (folder / "config.json").write_text(json.dumps(facts, indent=2) + "\n")
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}) + "\n"
    )
    tokenizer(facts["vocab_size"]).save(str(folder / "tokenizer.json"))
    dtype, seed = getattr(torch, arguments.dtype), arguments.seed
    weights = dict(tensors_of_family(folder, dtype, seed) if arguments.config else tensors(facts, dtype, seed))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return sum(weight.numel() for weight in weights.values())


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    result.add_argument("folder", type=Path)
    result.add_argument("--config", type=Path, help="a config.json, instead of the sizes below")
    result.add_argument("--layers", type=int, default=24)
    result.add_argument("--hidden", type=int, default=896)
    result.add_argument("--heads", type=int, default=14)
    result.add_argument("--kv-heads", type=int, default=2)
    result.add_argument("--ffn", type=int, default=4864)
    result.add_argument("--experts", type=int, default=0, help="of each layer, each of size --ffn; 0: a Llama")
    result.add_argument("--top-k", type=int, default=8, help="experts of a token")
    result.add_argument("--vocab", type=int, default=32000)
    result.add_argument("--context", type=int, default=4096)
    result.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="bfloat16")
    result.add_argument("--seed", type=int, default=0)
    return result


def main() -> None:
    arguments = parser().parse_args()
    parameters = write_model(arguments.folder, arguments)
    print(f"{arguments.folder}: {parameters / 1e6:.1f}M parameters, {arguments.dtype}")


if __name__ == "__main__":
    main()
