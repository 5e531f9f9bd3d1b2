"""The sampling kernels choose what :mod:`engine.execution.sampling` chooses, and penalise as ``adjust`` does.

Runs in Triton's interpreter, or on a CUDA device (see ``tests/interpreted.py``).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.contracts.request import SamplingParams
from engine.execution import philox
from engine.execution.adjust import adjust
from engine.execution.device_sampling import choose_on_device
from engine.execution.positions import Position, TableRow
from engine.execution.sampling import NOT_FINITE, choose
from engine.execution.triton_sampling.noise import gumbel, log, uniform
from engine.execution.triton_sampling.penalties import penalise_on_device
from engine.execution.triton_sampling.sampler import sample_on_device
from engine.execution.triton_sampling.survey import BORDER
from engine.execution.triton_sampling.tensors import LIST_LENGTH, PenaltyTensors, SamplingScratch, SamplingTensors

DEVICE = "cpu" if triton.knobs.runtime.interpret else "cuda"
torch.set_num_threads(1)

SEEDS = (0, 1, -1, 0x0123456789ABCDEF, 2**31, -(2**63), 2**63 - 1)
FILTERS: tuple[dict[str, Any], ...] = (
    {}, {"top_k": 1}, {"top_k": 3}, {"top_k": 100_000_000}, {"top_p": 0.9}, {"top_p": 1e-9}, {"top_p": 0.999999},
    {"min_p": 0.2}, {"min_p": 1.0}, {"top_k": 40, "top_p": 0.6}, {"top_k": 7, "top_p": 0.95, "min_p": 0.05},
    {"top_p": 0.5, "min_p": 0.01},
)  # fmt: skip
MIXED = tuple(
    SamplingParams(temperature=temperature, **filters)
    for filters, temperature in zip(FILTERS * 3, itertools.cycle((1.0, 0.0, 0.3, 2.5, 1e-6)))
)


def column(values: Sequence[float], dtype: torch.dtype) -> Tensor:
    return torch.tensor(values, dtype=dtype, device=DEVICE)


def tensors(params: Sequence[SamplingParams], **flags: bool) -> SamplingTensors:
    """Parameters of positions 0, 1, ... with seeds in turn; positions also beyond 32 bits."""
    return SamplingTensors(
        column([p.temperature for p in params], torch.float32),
        column([p.top_k for p in params], torch.int32),
        column([p.top_p for p in params], torch.float64),
        column([p.min_p for p in params], torch.float32),
        column([SEEDS[i % len(SEEDS)] for i in range(len(params))], torch.int64),
        column([i * (2**31 + 1) for i in range(len(params))], torch.int64),
        **flags,
    )


def wanted(logits: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    nothing = torch.zeros(0, dtype=torch.int64, device=DEVICE)
    at = [Position(p, SEEDS[i % len(SEEDS)], i * (2**31 + 1), 0, nothing) for i, p in enumerate(params)]
    return choose(logits, at)


def random_logits(rows: int, vocab: int, spread: float = 3.0) -> Tensor:
    return (torch.randn(rows, vocab, generator=torch.Generator().manual_seed(vocab)) * spread).to(DEVICE)


def assert_same(logits: Tensor, params: Sequence[SamplingParams]) -> None:
    before = logits.clone()
    got, want = sample_on_device(logits, tensors(params)), wanted(logits, params)
    assert got.dtype == torch.int64
    wrong = [(i, params[i], int(got[i]), int(want[i])) for i in range(len(params)) if got[i] != want[i]]
    assert not wrong, wrong
    assert torch.equal(logits.nan_to_num(7.0), before.nan_to_num(7.0)), "logits are only read"


@pytest.mark.parametrize(("rows", "vocab"), [(1, 5), (3, 1000), (5, 1024), (36, 1025)])
def test_every_mix_of_parameters_gives_the_tokens_of_the_reference(rows: int, vocab: int) -> None:
    assert_same(random_logits(rows, vocab), MIXED[:rows])


def test_a_real_vocabulary_gives_the_tokens_of_the_reference() -> None:
    assert_same(random_logits(1, 128_256), [SamplingParams(top_k=50, top_p=0.9, temperature=0.7)])


@pytest.mark.parametrize("kwargs", [{"top_k": 15_000}, {"top_p": 0.9999}, {"top_k": 17_000, "top_p": 0.5}])
def test_more_survivors_than_the_list_holds_change_nothing(kwargs: dict[str, Any]) -> None:
    vocab = LIST_LENGTH + 2000
    assert_same(random_logits(1, vocab, spread=0.5), [SamplingParams(**kwargs)])


def test_ties_with_the_border_are_all_kept() -> None:
    """Few levels, so every border is a tie of dozens; each token must be reachable, and no other."""
    logits = torch.arange(2048, device=DEVICE).remainder(7).float().log()[None, :].repeat(len(FILTERS) * 2, 1)
    params = [SamplingParams(**filters) for filters in FILTERS] * 2
    assert_same(logits, params)


def test_equal_tokens_are_cut_by_top_p_all_or_none() -> None:
    shares = (0.1, 0.3, 0.5, 0.7, 0.9) * 4
    assert_same(torch.zeros(len(shares), 10, device=DEVICE), [SamplingParams(top_p=share) for share in shares])


def test_minus_infinity_is_never_chosen_and_does_not_count() -> None:
    logits = torch.full((12, 3000), -math.inf, device=DEVICE)
    logits[:, 5::61] = random_logits(12, 50)
    assert_same(logits, MIXED[:12])
    only = torch.full((12, 1500), -math.inf, device=DEVICE)
    only[:, 1234] = -70.0
    assert sample_on_device(only, tensors(MIXED[:12])).tolist() == [1234] * 12


@pytest.mark.parametrize(("broken", "at"), [(math.nan, 0), (math.inf, 1023), (math.nan, 1024), (math.inf, 2047)])
def test_a_broken_row_says_so_and_spoils_no_other(broken: float, at: int) -> None:
    logits = random_logits(6, 2048)
    logits[2:4, at] = broken
    logits[4] = -math.inf
    params = [SamplingParams(temperature=t, top_k=k) for t, k in ((1, 0), (0, 0), (1, 5), (0, 0), (1, 5), (0.5, 5))]
    got = sample_on_device(logits, tensors(params)).tolist()
    assert got == wanted(logits, params).tolist()
    assert [token == NOT_FINITE for token in got] == [False, False, True, True, True, False]


def test_the_lowest_of_equal_ids_is_the_greedy_one_across_chunks() -> None:
    logits = torch.zeros(1, 4096, device=DEVICE)
    logits[0, [1500, 1501, 4000]] = 9.0
    assert sample_on_device(logits, tensors([SamplingParams(temperature=0.0)])).tolist() == [1500]


def test_logits_may_be_a_view_of_wider_rows() -> None:
    wide = torch.full((7, 3000), math.nan, device=DEVICE)
    wide[:, :2500] = random_logits(7, 2500)
    got = sample_on_device(wide[:, :2500], tensors(MIXED[:7]))
    assert torch.equal(got, wanted(wide[:, :2500].contiguous(), MIXED[:7]))


def test_the_host_may_promise_that_launches_are_not_needed() -> None:
    logits = random_logits(5, 3000)
    greedy = [SamplingParams(temperature=0.0)] * 5
    assert torch.equal(sample_on_device(logits, tensors(greedy, sampled=False)), wanted(logits, greedy))
    plain = [SamplingParams(min_p=m) for m in (0.0, 0.1, 0.5, 0.0, 0.9)]
    assert torch.equal(sample_on_device(logits, tensors(plain, filtered=False)), wanted(logits, plain))


def test_one_scratch_serves_batches_in_turn_and_its_counters_return_to_zero() -> None:
    scratch = SamplingScratch.allocate(13, 2500, DEVICE)
    for rows in (7, 3, 7):
        logits = random_logits(rows, 2500)
        assert torch.equal(sample_on_device(logits, tensors(MIXED[:rows]), scratch), wanted(logits, MIXED[:rows]))
        assert not scratch.counters.any()


def test_a_border_does_not_depend_on_where_the_tokens_are() -> None:
    """Which program lists its tokens first is a matter of luck on a GPU."""
    logits = random_logits(1, 6000)
    orders = [torch.randperm(6000, generator=torch.Generator().manual_seed(i)).to(DEVICE) for i in range(3)]
    borders = []
    for order in orders:
        scratch = SamplingScratch.allocate(1, 6000, DEVICE)
        sample_on_device(logits[:, order].contiguous(), tensors([SamplingParams(top_k=900, top_p=0.8)]), scratch)
        borders.append(scratch.facts[BORDER.value].item())
    assert len(set(borders)) == 1 and -20.0 < borders[0] < 0.0, borders


@triton.jit
def write_noise(seed_ptr, position_ptr, unit_ptr, noise_ptr, PURPOSE: tl.constexpr, COUNT: tl.constexpr):
    row, first = tl.program_id(0), tl.program_id(1) * COUNT
    seed, position = tl.load(seed_ptr + row), tl.load(position_ptr + row)
    at = row * COUNT * tl.num_programs(1) + first + tl.arange(0, COUNT)
    tl.store(unit_ptr + at, uniform(seed, position, first, PURPOSE, COUNT))
    tl.store(noise_ptr + at, gumbel(seed, position, first, PURPOSE, COUNT))


@pytest.mark.parametrize("purpose", [philox.SAMPLE, philox.DRAFT])
def test_uniforms_are_bit_identical_and_gumbels_within_rounding(purpose: int) -> None:
    seeds, positions = column(SEEDS, torch.int64), column([0, 1, 2**31, 2**32 + 5, 7, -1, 3], torch.int64)
    unit, noise = (torch.empty(len(SEEDS), 3072, device=DEVICE) for _ in range(2))
    write_noise[(len(SEEDS), 3)](seeds, positions, unit, noise, PURPOSE=purpose, COUNT=1024, enable_fp_fusion=False)
    want = philox.uniform(seeds, positions, purpose, 3072)
    assert torch.equal(unit, want)
    exact = -(-torch.log1p(-want.double())).log()
    assert ((noise.double() - exact).abs() / exact.abs().clamp(min=1.0)).max() < 4e-7


@triton.jit
def write_log(x_ptr, out_ptr, COUNT: tl.constexpr):
    at = tl.arange(0, COUNT)
    tl.store(out_ptr + at, log(tl.load(x_ptr + at)))


def test_the_logarithm_is_right_to_two_units_in_the_last_place() -> None:
    powers = torch.linspace(-100.0, 60.0, 2048, dtype=torch.float64)
    near_one = 1.0 + torch.linspace(-0.45, 0.45, 2048, dtype=torch.float64).pow(3)
    x = torch.cat((powers.exp2(), near_one)).float()
    out = torch.empty_like(x, device=DEVICE)
    write_log[(1,)](x.to(DEVICE), out, COUNT=4096, enable_fp_fusion=False)
    exact = x.double().log()
    assert ((out.cpu().double() - exact).abs() <= 2.0 * 2.0**-23 * exact.abs()).all()


PENALTIES: tuple[dict[str, float], ...] = (
    {}, {"repetition_penalty": 1.3}, {"presence_penalty": 0.7}, {"frequency_penalty": -0.4},
    {"repetition_penalty": 0.8, "presence_penalty": -1.1, "frequency_penalty": 0.37},
)  # fmt: skip


@pytest.mark.parametrize("vocab", [5, 1500])
@pytest.mark.parametrize("known", [1, 40, 2600])
def test_penalties_change_the_logits_exactly_as_the_reference_does(vocab: int, known: int) -> None:
    """Prompt, output and drafts before the position; what the table holds after them must not be seen."""
    generator = torch.Generator().manual_seed(known)
    slots, prompt_len = (4, 0, 2, 2, 1), max(1, known // 2)
    table = torch.randint(0, vocab, (5, known + 9), generator=generator).to(DEVICE)
    logits = random_logits(5, vocab)
    logits[0, 0], logits[1, 1] = -math.inf, math.nan
    drafts = (0, 3, 0, 2, 1)
    at = [
        Position(
            SamplingParams(**PENALTIES[i]), 0, 0, prompt_len, table[slot, :known],
            drafts=tuple(table[slot, known : known + drafts[i]].tolist()),
        )
        for i, slot in enumerate(slots)
    ]  # fmt: skip
    want = adjust(logits, at)
    penalise_on_device(
        logits,
        PenaltyTensors(
            table, column(slots, torch.int64), column([prompt_len] * 5, torch.int64),
            column([known + d for d in drafts], torch.int64),
            column([p.params.repetition_penalty for p in at], torch.float32),
            column([p.params.presence_penalty for p in at], torch.float32),
            column([p.params.frequency_penalty for p in at], torch.float32),
        ),
    )  # fmt: skip
    assert torch.equal(logits.nan_to_num(7.0), want.nan_to_num(7.0))


def test_positions_reach_the_kernels_as_they_are() -> None:
    """One column swapped on its way up would change some token."""
    mixed = MIXED[:13]
    logits = random_logits(len(mixed), 300)
    nothing = torch.zeros(0, dtype=torch.int64, device=DEVICE)
    at = [Position(p, SEEDS[i % len(SEEDS)], 3 * i, 0, nothing) for i, p in enumerate(mixed)]
    assert torch.equal(choose_on_device(logits, at), choose(logits, at))
    greedy = [Position(SamplingParams(temperature=0.0), 0, 0, 0, nothing)] * len(mixed)
    assert torch.equal(choose_on_device(logits, greedy), choose(logits, greedy))


def test_penalties_read_the_table_that_the_drafts_are_in() -> None:
    logits = random_logits(4, 60)
    generator = torch.Generator().manual_seed(3)
    table = torch.randint(0, 60, (3, 40), generator=generator).to(DEVICE)
    hard = SamplingParams(repetition_penalty=1.4, presence_penalty=0.5, frequency_penalty=0.3)
    soft = SamplingParams(repetition_penalty=0.8)

    def position(params: SamplingParams, slot: int, known: int, drafts: int, in_table: bool) -> Position:
        text = table[slot]
        guesses = tuple(text[known : known + drafts].tolist())
        row = TableRow(table, slot) if in_table else None
        return Position(params, 0, 5, known // 2, text[:known], (), guesses, row)

    def adjusted(in_table: bool) -> Tensor:
        cases = ((hard, 2, 9, 0), (hard, 2, 9, 3), (SamplingParams(), 1, 4, 0), (soft, 0, 1, 1))
        return adjust(logits, [position(*case, in_table) for case in cases], on_triton=in_table)

    assert torch.equal(adjusted(in_table=True), adjusted(in_table=False))
    assert not torch.equal(adjusted(in_table=True), logits)
