"""A build context for tests of plugins that need no model."""

from __future__ import annotations

from engine.contracts.config import Settings
from engine.contracts.model import DeviceFacts, ModelFacts
from engine.contracts.ops import Attention
from engine.contracts.provider import BuildContext


def build_context(
    block_size: int = 16,
    max_len: int = 4096,
    max_requests: int = 32,
    max_draft_tokens: int = 4,
    device: DeviceFacts | None = None,
    dtype: str = "float32",
    execution: str = "eager",
) -> BuildContext:
    """What a factory is handed, for a made-up one-layer model on a CPU."""
    model = ModelFacts(
        path="",
        name="tiny",
        architecture="LlamaForCausalLM",
        hidden_size=16,
        num_layers=1,
        vocab_size=64,
        max_position=max_len,
        tie_embeddings=True,
        attentions=(Attention(2, 2, 8, 8**-0.5),),
        dtype="float32",
        quantization=None,
        bos_token_id=None,
        eos_token_ids=(),
        raw={},
    )
    return BuildContext(
        model=model,
        device=device or DeviceFacts("cpu"),
        dtype=dtype,
        execution=execution,
        max_len=max_len,
        max_requests=max_requests,
        block_size=block_size,
        max_draft_tokens=max_draft_tokens,
        settings=Settings(device="cpu"),
    )
