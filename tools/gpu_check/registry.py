"""Every section, in the order in which the table shows them. Budgets add up to less than ten minutes."""

from __future__ import annotations

from gpu_check.section import Section

TOTAL_S = 595.0
"""The whole run: sections that would end later get less time, or none."""

SECTIONS: tuple[Section, ...] = (
    Section("smoke", "smoke", "one kernel pair, one graph, two layers in bf16 and int4: else nothing follows", 120,
            alone=True, is_gate=True),
    Section("rates", "rates", "what the card reads, copies and multiplies per second", 20, alone=True),
    Section("prepare", "prepare", "random weights in true shapes, for the sections that measure", 140),
    Section("compile_1b", "compile_baselines", "warm compile caches for the baselines", 140, gpu_only=True,
            argument="1b", is_optional=True),
    Section("compile_8b", "compile_baselines", "the same", 140, gpu_only=True, argument="8b", is_optional=True),
    Section("attention", "attention", "attention kernels against float64, and replayed in graphs", 140,
            interpreted=True),
    Section("linears", "linears", "fused linears, norm, RoPE and KV write against float64, PDL on and off", 140,
            interpreted=True),
    Section("formats", "formats", "quantized linears of every format against float64", 140, interpreted=True),
    Section("sampling", "sampling", "sampling kernels against torch on the CPU, in real vocabularies", 140,
            interpreted=True),
    Section("machine_code", "machine_code", "weights are loaded above the wait of a dependent launch", 140),
    Section("dependent_launch", "dependent_launch", "a whole model with PDL on and off: equal", 140, gpu_only=True),
    Section("laws_float32", "laws", "float32 tokens equal the CPU's for every preset, execution and overlap", 140,
            argument="float32"),
    Section("laws_bfloat16", "laws", "the same in bfloat16: differences counted, with margins", 140,
            argument="bfloat16", gpu_only=True),
    Section("ranks", "ranks", "float32 tokens of several ranks equal those of one", 140),
    Section("mixed", "mixed", "mixed load with aborts: nothing leaks, nothing is compiled or captured", 140),
    Section("attention_speed", "attention_speed", "attention per layer against the card's rates", 25, alone=True,
            needs=("rates",), gpu_only=True),
    Section("speed_1b", "speed", "Llama-3.2-1B: decode, TTFT, host gap, ledger, baselines", 75, alone=True,
            needs=("rates", "prepare"), argument="1b"),
    Section("speed_8b", "speed", "Llama-3.1-8B: the same", 100, alone=True, needs=("rates", "prepare"), argument="8b",
            gpu_only=True),
    Section("start", "start", "first start with empty caches, second start with warm ones", 75, alone=True,
            needs=("prepare",)),
    Section("serve", "serve", "engine serve and engine bench over loopback", 35, alone=True, needs=("prepare",)),
)  # fmt: skip

ON_REQUEST: tuple[Section, ...] = (
    Section("kernel_tests", "kernel_tests", "the test suites of the kernels, on the card", 240, gpu_only=True),
    Section("kernels_1b", "kernel_times", "Llama-3.2-1B: every kernel of a decode step, how often and how long", 40,
            alone=True, needs=("prepare",), argument="1b", gpu_only=True),
    Section("kernels_8b", "kernel_times", "Llama-3.1-8B: the same", 60, alone=True, needs=("prepare",), argument="8b",
            gpu_only=True),
    Section("formats_speed", "formats_speed", "8B linears in each weight format against reading them, and bf16", 240,
            alone=True, needs=("rates",), gpu_only=True),
    Section("speed_8b_formats", "speed_formats", "Llama-3.1-8B: decode in fp8, int8 and int4, rounded while loading",
            300, alone=True, needs=("rates", "prepare"), argument="8b", gpu_only=True),
    Section("drafting", "drafting", "Llama-3.1-8B with an EAGLE3 head: decode steps by drafts, bf16 and fp8", 400,
            alone=True, needs=("rates", "prepare"), argument="8b"),
    Section("tiles", "tiles", "chains of products with other tiles, attention in other cuts", 300, alone=True,
            interpreted=True),
    Section("mixtures", "mixtures", "Qwen3-30B-A3B and gpt-oss-20b shapes: decode against reading active weights", 400,
            alone=True, needs=("rates",), interpreted=True),
)  # fmt: skip
"""What takes too long for every run (many kernels to compile, all weights of an 8B model to round): asked for by
name."""

ALL = (*SECTIONS, *ON_REQUEST)
BY_NAME = {section.name: section for section in ALL}


def chosen(only: list[str] | None, dry_run: bool) -> tuple[tuple[Section, ...], tuple[Section, ...]]:
    """Sections to run, those they need included, and those a dry run leaves out."""
    wanted = {section.name for section in SECTIONS} if not only else set(only)
    for section in reversed(ALL):
        if section.name in wanted:
            wanted.update(section.needs)
    picked = [section for section in ALL if section.name in wanted]
    left_out = tuple(section for section in picked if dry_run and section.gpu_only)
    return tuple(section for section in picked if section not in left_out), left_out


def waves(sections: tuple[Section, ...], dry_run: bool) -> list[tuple[Section, ...]]:
    """Sections that may run side by side, in order. Those that measure time are alone, except in a dry run, where
    times mean nothing: there only what others need goes first."""
    if dry_run:
        needed = {name for section in sections for name in section.needs}
        first = tuple(section for section in sections if section.name in needed)
        rest = tuple(section for section in sections if section.name not in needed)
        return [wave for wave in (first, rest) if wave]
    result: list[list[Section]] = []
    for section in sections:
        if section.alone or not result or result[-1][0].alone:
            result.append([section])
        else:
            result[-1].append(section)
    return [tuple(wave) for wave in result]
