"""Architectures."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from engine_plugins.architecture.llama import LlamaArchitecture


class DescribesNothing(LlamaArchitecture):
    """Returns ``None``."""

    says = r"describe\(\) returned ops that do not fit: ops is None, expected ModelOps"

    def describe(self, model: Any) -> Any:
        return None


class DescribesDict(LlamaArchitecture):
    """Returns layers by number."""

    says = r"describe\(\) returned ops that do not fit: ops\.layers is \{.*expected tuple"

    def describe(self, model: Any) -> Any:
        ops = super().describe(model)
        return replace(ops, layers=dict(enumerate(ops.layers)))  # type: ignore[arg-type]


class LayerShort(LlamaArchitecture):
    """Forgets the last layer."""

    says = r"describe\(\) returned ops that do not fit: 2 layers, expected 3"

    def describe(self, model: Any) -> Any:
        ops = super().describe(model)
        return replace(ops, layers=ops.layers[:-1])


class OtherHeads(LlamaArchitecture):
    """Says twice the KV heads."""

    says = r"describe\(\) returned ops that do not fit: layers\[0\]: NormQKVRopeWrite with 4 heads"

    def describe(self, model: Any) -> Any:
        return super().describe(replace(model, num_kv_heads=4))


class OtherWidth(LlamaArchitecture):
    """Says another width of the hidden states."""

    says = r"describe\(\) returned ops that do not fit: embed \[120, 32\], expected \[120, 64\]"

    def describe(self, model: Any) -> Any:
        return super().describe(replace(model, hidden_size=32))


class OtherNames(LlamaArchitecture):
    """Names tensors that the checkpoint does not have."""

    is_named = False  # the checkpoint may be at fault as well
    says = r"tensors missing from the checkpoint: model\.embedding\.weight"

    def describe(self, model: Any) -> Any:
        ops = super().describe(model)
        return replace(ops, embed=replace(ops.embed, name="model.embedding"))


class Raises(LlamaArchitecture):
    """Raises."""

    says = r"describe\(\) raised KeyError: 'rope' \(architectures\.py:\d+\)"

    def describe(self, model: Any) -> Any:
        return model.raw["rope"]
