"""Architectures."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from engine_plugins.architecture.llama import LlamaArchitecture


class RecordsNothing(LlamaArchitecture):
    """Forgets to."""

    says = r"describe\(\) recorded a graph that is no whole model: expected positions\(\) of at least 1"

    def describe(self, model: Any, b: Any) -> None:
        return None


class NoHead(LlamaArchitecture):
    """Ends after the last norm."""

    says = r"is no whole model: expected one lm_head\(\), after the last layer"

    def describe(self, model: Any, b: Any) -> None:
        b.lm_head = lambda *args, **options: None
        super().describe(model, b)


class SmallTable(LlamaArchitecture):
    """Embeds fewer tokens than it has logits for."""

    says = r"is no whole model: logits of 120 tokens, embeddings of 100"

    def describe(self, model: Any, b: Any) -> None:
        b.embed = lambda name, vocab_size, size: type(b).embed(b, name, 100, size)
        super().describe(model, b)


class LayerShort(LlamaArchitecture):
    """Forgets the last layer."""

    is_named = False  # the checkpoint may be at fault as well
    says = r"the checkpoint has tensors this architecture does not use: model\.layers\.2\."

    def describe(self, model: Any, b: Any) -> None:
        super().describe(replace(model, raw={**model.raw, "num_hidden_layers": 2}), b)


class OtherNames(LlamaArchitecture):
    """Names tensors that the checkpoint does not have."""

    is_named = False  # as above
    says = r"tensors missing from the checkpoint: model\.embedding\.weight"

    def describe(self, model: Any, b: Any) -> None:
        b.embed = lambda name, *sizes: type(b).embed(b, "model.embedding", *sizes)
        super().describe(model, b)


class OtherActivation(LlamaArchitecture):
    """Names an activation that there is not."""

    says = r"is no whole model: graph\.layers\[0\]\.nodes\[9\]\.op\.act is 'tanh', expected 'silu' or "

    def describe(self, model: Any, b: Any) -> None:
        b.gated = lambda gate, up, act: type(b).gated(b, gate, up, "tanh")
        super().describe(model, b)


class NameOfNoText(LlamaArchitecture):
    """Names a part with a number."""

    says = r"is no whole model: graph\.layers\[0\]\.nodes\[1\]\.op\.spec\.parts\[0\]\.name is 7, expected str"

    def describe(self, model: Any, b: Any) -> None:
        def linear(x: Any, *parts: Any, shard: Any) -> Any:
            return type(b).linear(b, x, *(replace(part, name=7) for part in parts), shard=shard)

        b.linear = linear
        super().describe(model, b)


class KeepsValues(LlamaArchitecture):
    """Goes on with values of an earlier description."""

    says = r"describe\(\) raised ValueError: Value\(number=\d+, size=64\) was made by another builder"

    def describe(self, model: Any, b: Any) -> None:
        other = type(b)()
        super().describe(model, other)
        b.rms_norm(other.input(64), "model.norm", 1e-5)


class SizesThatDoNotFit(LlamaArchitecture):
    """Adds what has another size."""

    says = r"describe\(\) raised ValueError: Add of 64 and 32 features \(graph\.py:\d+\)"

    def describe(self, model: Any, b: Any) -> None:
        b.add(b.embed("model.embed_tokens", 120, 64), b.embed("model.embed_positions", 120, 32))


class HalfAFunction(LlamaArchitecture):
    """Computes with a function that returns half of what it says."""

    is_named = False  # its function is, by module and name
    says = r"torch function [\w.]+:half returned float32 \[3, 32\] on cpu, expected contiguous float32 \[3, 64\]"

    def describe(self, model: Any, b: Any) -> None:
        b.rms_norm = lambda x, *args, **options: b.torch_function(
            f"{__name__}:half", type(b).rms_norm(b, x, *args, **options), size=x.size
        )
        super().describe(model, b)


def half(x: Any) -> Any:
    return x[:, : x.shape[1] // 2].contiguous()


class Raises(LlamaArchitecture):
    """Raises."""

    says = r"describe\(\) raised KeyError: 'rope' \(architectures\.py:\d+\)"

    def describe(self, model: Any, b: Any) -> None:
        model.raw["rope"]
