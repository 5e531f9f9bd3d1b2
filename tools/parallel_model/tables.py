"""Tables of what is estimated, and of what the estimates were fitted to."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import sqrt

from tools.parallel_model.anchors import COMPILED, SERVING, Anchor, anchors
from tools.parallel_model.fitting import estimated_ms, fit
from tools.parallel_model.models import graph

from engine.contracts.ops import Experts
from engine.models.layout import Layout
from engine_lab.shared.estimates.collectives import RATE, Figure, collectives
from engine_lab.shared.estimates.devices import Device
from engine_lab.shared.estimates.efficiency import Efficiency
from engine_lab.shared.estimates.errors import EstimateError
from engine_lab.shared.estimates.steps import Estimate, Memory

GB = 10**9
LAYOUTS = (
    Layout(), Layout(tp=2), Layout(tp=4), Layout(tp=8), Layout(pp=2), Layout(pp=4), Layout(pp=8), Layout(tp=2, pp=2),
    Layout(tp=4, pp=2),
)  # fmt: skip
EXPERT_LAYOUTS = (
    Layout(tp=2, ep=2),
    Layout(tp=4, ep=4),
    Layout(tp=8, ep=8),
    Layout(tp=8, ep=4),
    Layout(tp=4, pp=2, ep=4),
)
"""Of models with experts, too."""


@dataclass(frozen=True, slots=True)
class Question:
    """Everything that estimates follow from, beside the model and the layout."""

    devices: tuple[Device, ...]
    figures: tuple[Figure, ...]
    methods: tuple[str, ...]
    efficiency: Efficiency
    context: int
    prompt: int
    memory: Memory = field(default_factory=Memory)

    def __post_init__(self) -> None:
        if self.context < 0 or self.prompt < 1:
            raise EstimateError(
                f"--context {self.context} --prompt {self.prompt}: expected at least 0 and at least 1 token"
            )


def inputs(question: Question) -> Iterator[str]:
    """A list of them."""
    for device in question.devices:
        yield (
            f"* {device.name}: {device.bandwidth / 1e12:.2f} TB/s, {device.flops / 1e12:.0f} TFLOP/s, "
            f"{device.memory / 2**30:.0f} GiB, links of {device.link / 1e9:.0f} GB/s ({device.source})"
        )
    found = question.efficiency
    yield (
        f"* {found.bandwidth:.0%} of the bandwidth, {found.flops:.0%} of the FLOP/s, {found.layer_us:.0f} us a layer, "
        f"{found.mixture_us:.0f} us a mixture of experts ({found.source or 'as stated'})"
    )
    for method in question.methods:
        chosen = collectives(method, question.devices[0].link, question.figures)
        times = ", ".join(f"{chosen.all_reduce_us(65536, ranks):.0f}" for ranks in (2, 4, 8))
        sources = ", ".join(dict.fromkeys(figure.source for figure in chosen.figures))
        yield f"* {chosen.method}, {chosen.labels}: {times} us for 64 KiB over 2, 4, 8 ranks ({sources})"
    yield f"* sums beyond the largest figure cross links at {RATE:.0%} of their rate: assumed"
    memory = question.memory
    yield (
        f"* memory.fraction={memory.fraction}, of which {memory.set_aside / 2**30:.0f} GiB are neither weights nor KV "
        "pool: assumed; bfloat16 weights, keys and values"
    )


def model_table(model: str, question: Question) -> Iterator[str]:
    """One model: a row for each layout, in each cell the devices in their order. All but one column are with the first
    method."""
    first, *others = question.methods
    columns = [
        f"{model} on {' / '.join(device.name for device in question.devices)}",
        "weights of a rank, GB",
        f"ITL, batch 1, ms, {first}",
        *(f"the same, {other}" for other in others),
        "ITL, batch 32, ms",
        f"TTFT of {question.prompt:,} tokens, ms",
        "KV tokens, thousands",
        "label",
    ]
    yield f"| {' | '.join(columns)} |"
    yield "|---" * len(columns) + "|"
    has_experts = any(isinstance(node.op, Experts) for node in graph(model).nodes)
    for layout in (*LAYOUTS, *(EXPERT_LAYOUTS if has_experts else ())):
        try:
            cells = _cells(model, layout, question)
        except EstimateError as error:
            cells = [f"refused: {error}", *[""] * (len(columns) - 3)]
        yield f"| {_name(layout)} | {' | '.join(cells)} | estimated |"


def _cells(model: str, layout: Layout, question: Question) -> list[str]:
    by_method = [
        [_estimate(model, layout, device, method, question) for device in question.devices]
        for method in question.methods
    ]
    mine = by_method[0]
    tokens = [each.binding().kv_tokens or 0 for each in mine]
    fits = [count > 0 for count in tokens]
    weights = max(rank.weights for rank in mine[0].rank_memory())
    return [
        f"{weights / GB:.1f}",
        *(_cell([each.decode(1, question.context).ms for each in row], fits) for row in by_method),
        _cell([each.decode(32, question.context).ms for each in mine], fits),
        _cell([each.prefill(question.prompt).ms for each in mine], fits, 0),
        _cell([count / 1e3 for count in tokens], fits, 0),
    ]


def _estimate(model: str, layout: Layout, device: Device, method: str, question: Question) -> Estimate:
    costs = collectives(method, device.link, question.figures)
    return Estimate(graph(model), layout, device, costs, question.efficiency, memory=question.memory)


def _cell(values: Sequence[float], fits: Sequence[bool], digits: int = 1) -> str:
    return " / ".join(f"{value:.{digits}f}" if fit else "-" for value, fit in zip(values, fits, strict=True))


def _name(layout: Layout) -> str:
    sizes = {"tp": layout.tp, "pp": layout.pp, "ep": layout.ep}
    return ", ".join(f"{key} {size}" for key, size in sizes.items() if size > 1) or "one card"


def fit_table() -> Iterator[str]:
    """Each anchor with its residual, by what was fitted together."""
    known = list(anchors())
    for stack in (COMPILED, SERVING):
        mine = [anchor for anchor in known if anchor.stack == stack]
        found, free = fit(mine), fit(mine, None)
        yield f"{stack}: {_coefficients(mine, found)}"
        yield f"With collectives fitted, too: {free.collective:.2f} of what is published; {_coefficients(mine, free)}"
        yield from ("", "| model | device | tp | batch | ms | estimated | residual | source | fitted |")
        yield "|---|---|---|---|---|---|---|---|---|"
        for anchor in mine:
            ms = estimated_ms(anchor, found)
            name = anchor.model + {16.0: "", 8.0: ", int8"}.get(anchor.widths.experts, ", MXFP4")
            cells = [name, anchor.device, anchor.tp, anchor.batch, f"{anchor.ms:.2f}", f"{ms:.2f}"]
            cells += [
                f"{ms / anchor.ms - 1:+.0%}",
                anchor.source,
                f"no: {anchor.left_out}" if anchor.left_out else "yes",
            ]
            yield f"| {' | '.join(map(str, cells))} |"
        yield ""


def _coefficients(known: Sequence[Anchor], found: Efficiency) -> str:
    return (
        f"{found.bandwidth:.1%} of the bandwidth, {found.layer_us:.1f} us a layer, {found.mixture_us:.1f} us a mixture "
        f"of experts; root mean square of residuals {spread(known, found):.1%}"
    )


def spread(known: Sequence[Anchor], efficiency: Efficiency) -> float:
    """Root mean square of relative residuals, of anchors that are fitted to."""
    errors = [estimated_ms(anchor, efficiency) / anchor.ms - 1.0 for anchor in known if not anchor.left_out]
    return sqrt(sum(error * error for error in errors) / len(errors))
