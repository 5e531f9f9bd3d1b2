"""What the engine is compared with, on the same weights in the same run. Each says how long a decode step takes it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from gpu_check.plain_llama import PlainLlama, layer
from gpu_check.shapes import Shape, config
from gpu_check.timing import synchronize, wall_s

STEPS = 32


class Contestant(Protocol):
    """A batch of sequences of about ``context`` tokens, ready to go on."""

    def step_ms(self) -> float:
        """Milliseconds per decode step over :data:`STEPS` steps."""
        ...


class Eager:
    """Plain torch, one operation after another."""

    def __init__(self, shape: Shape, weights: dict[str, Tensor], rows: int, context: int) -> None:
        self.device = str(next(iter(weights.values())).device.type)
        self.context = context
        max_len = -(-(context + STEPS + 8) // 64) * 64
        self.model = PlainLlama(shape, weights, rows, max_len)
        self.tokens = torch.ones(rows, 1, dtype=torch.int64, device=self.device)
        self.position = torch.full((1,), context, dtype=torch.int64, device=self.device)
        self.run: Callable[..., Tensor] = layer

    def step(self) -> None:
        """One token more for every row; nothing of it is known to the host."""
        logits = self.model(self.tokens, self.position, self.run)
        self.tokens.copy_(logits.argmax(dim=-1, keepdim=True))
        self.position.add_(1)

    def step_ms(self) -> float:
        self.position.fill_(self.context)
        return wall_s(self._steps, self.device) * 1e3 / STEPS

    def _steps(self) -> None:
        with torch.inference_mode():
            for _ in range(STEPS):
                self.step()


class Compiled(Eager):
    """The same with its layer through ``torch.compile``, and on a GPU the whole step in one CUDA graph."""

    def __init__(self, shape: Shape, weights: dict[str, Tensor], rows: int, context: int) -> None:
        super().__init__(shape, weights, rows, context)
        # On a CPU a dry run tries only the path: building kernels there would take longer than all else.
        backend = "eager" if self.device == "cpu" else "inductor"
        self.run = torch.compile(layer, dynamic=False, fullgraph=True, backend=backend)
        self.replay: Callable[[], Any] = self.step
        with torch.inference_mode():
            self.step()
            if self.device != "cpu":
                self.replay = self._captured()

    def _captured(self) -> Callable[[], None]:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                self.step()
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.step()
        return graph.replay

    def _steps(self) -> None:
        with torch.inference_mode():
            for _ in range(STEPS):
                self.replay()


class Transformers:
    """``generate`` of Hugging Face transformers with a static cache, which compiles its forward pass on a GPU.

    It looks at every token on the host to see whether it is done, so the time between two looks is a step's.
    """

    def __init__(self, shape: Shape, weights: dict[str, Tensor], rows: int, context: int) -> None:
        from transformers import LlamaConfig, LlamaForCausalLM
        from transformers.utils import logging

        logging.set_verbosity_error()
        first = next(iter(weights.values()))
        self.device = first.device.type
        facts = LlamaConfig(**config(shape, first.dtype))
        before = torch.get_default_dtype()
        torch.set_default_dtype(first.dtype)
        try:
            with torch.device(first.device):
                self.model = LlamaForCausalLM(facts).eval()
        finally:
            torch.set_default_dtype(before)
        missing, unexpected = self.model.load_state_dict(weights, strict=False, assign=True)
        if unexpected or set(missing) - {"lm_head.weight"}:
            raise RuntimeError(f"transformers names its tensors differently: {missing} {unexpected}")
        self.model.tie_weights()
        self.prompt = torch.arange(rows * context, device=self.device).view(rows, context) % 500 + 3
        self.model.generation_config.eos_token_id = None
        self.times: list[float] = []
        self.step_ms()  # compiles

    def look(self, tokens: Tensor, scores: Any, **_: Any) -> Tensor:
        """A stopping criterion that never stops."""
        synchronize(self.device)
        self.times.append(time.perf_counter())
        return torch.zeros(tokens.shape[0], dtype=torch.bool, device=tokens.device)

    def step_ms(self) -> float:
        from transformers import StoppingCriteriaList

        self.times.clear()
        options: dict[str, Any] = {"disable_compile": True} if self.device == "cpu" else {}
        with torch.inference_mode():
            self.model.generate(
                self.prompt, attention_mask=torch.ones_like(self.prompt), max_new_tokens=STEPS + 1, do_sample=False,
                cache_implementation="static", pad_token_id=0, stopping_criteria=StoppingCriteriaList([self.look]),
                **options,
            )  # fmt: skip
        assert len(self.times) == STEPS + 1, f"{len(self.times)} tokens"
        return (self.times[-1] - self.times[0]) * 1e3 / STEPS
