"""The sampling kernels choose what :mod:`engine.sampling.choose` chooses, and penalise as ``adjust_`` does.

Runs in Triton's interpreter, or on a CUDA device (see ``tests/interpreted.py``).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.contracts.request import SamplingParams
from engine.kernels.torch.reference import NOT_FINITE
from engine.sampling import philox
from engine.sampling.adjust import adjust_
from engine.sampling.choose import choose
from engine.sampling.state import Feature, SamplingBatch, SamplingState
from engine.sampling.triton.masks import mask_on_device
from engine.sampling.triton.noise import gumbel, gumbel_of, log, uniform
from engine.sampling.triton.penalties import penalise_on_device
from engine.sampling.triton.sampler import _scratch, sample_on_device
from engine.sampling.triton.survey import BORDER
from engine.sampling.triton.tensors import LIST_LENGTH

from ...launches import count_launches
from ..requests import Request, Tables, batch_of

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


def batch_for(params: Sequence[SamplingParams]) -> SamplingBatch:
    """Positions 0, 1, ... with seeds in turn; positions also beyond 32 bits."""
    count = range(len(params))
    return batch_of(params, [SEEDS[i % len(SEEDS)] for i in count], [i * (2**31 + 1) for i in count], DEVICE)


def random_logits(rows: int, vocab: int, spread: float = 3.0) -> Tensor:
    return (torch.randn(rows, vocab, generator=torch.Generator().manual_seed(vocab)) * spread).to(DEVICE)


def assert_same(logits: Tensor, params: Sequence[SamplingParams]) -> None:
    before = logits.clone()
    batch = batch_for(params)
    got, want = sample_on_device(logits, batch), choose(logits, batch)
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
    logits = torch.arange(2048, device=DEVICE).remainder(7).float().log()[None, :].repeat(len(FILTERS), 1)
    params = [SamplingParams(**filters) for filters in FILTERS]
    assert_same(logits, params)


def test_equal_tokens_are_cut_by_top_p_all_or_none() -> None:
    shares = (0.1, 0.3, 0.5, 0.7, 0.9) * 2
    assert_same(torch.zeros(len(shares), 10, device=DEVICE), [SamplingParams(top_p=share) for share in shares])


def test_minus_infinity_is_never_chosen_and_does_not_count() -> None:
    logits = torch.full((12, 2000), -math.inf, device=DEVICE)
    logits[:, 5::40] = random_logits(12, 50)
    assert_same(logits, MIXED[:12])
    only = torch.full((6, 1500), -math.inf, device=DEVICE)
    only[:, 1234] = -70.0
    assert sample_on_device(only, batch_for(MIXED[4:10])).tolist() == [1234] * 6


@pytest.mark.parametrize(("broken", "at"), [(math.nan, 0), (math.inf, 1023), (math.nan, 1024), (math.inf, 2047)])
def test_a_broken_row_says_so_and_spoils_no_other(broken: float, at: int) -> None:
    logits = random_logits(6, 2048)
    logits[2:4, at] = broken
    logits[4] = -math.inf
    params = [SamplingParams(temperature=t, top_k=k) for t, k in ((1, 0), (0, 0), (1, 5), (0, 0), (1, 5), (0.5, 5))]
    batch = batch_for(params)
    got = sample_on_device(logits, batch).tolist()
    assert got == choose(logits, batch).tolist()
    assert [token == NOT_FINITE for token in got] == [False, False, True, True, True, False]


def test_the_lowest_of_equal_ids_is_the_greedy_one_across_chunks() -> None:
    logits = torch.zeros(1, 4096, device=DEVICE)
    logits[0, [1500, 1501, 4000]] = 9.0
    assert sample_on_device(logits, batch_for([SamplingParams(temperature=0.0)])).tolist() == [1500]


def test_logits_may_be_a_view_of_wider_rows() -> None:
    wide = torch.full((7, 3000), math.nan, device=DEVICE)
    wide[:, :2500] = random_logits(7, 2500)
    batch = batch_for(MIXED[:7])
    assert torch.equal(sample_on_device(wide[:, :2500], batch), choose(wide[:, :2500].contiguous(), batch))


@pytest.mark.parametrize(
    ("settings", "features"),
    [({"temperature": 0.0}, Feature.NONE), ({}, Feature.SAMPLED), ({"min_p": 0.3}, Feature.SAMPLED)],
)
def test_launches_that_no_request_needs_change_no_token(settings: dict[str, float], features: Feature) -> None:
    logits, batch = random_logits(5, 3000), batch_for([SamplingParams(**settings)] * 5)
    assert batch.features == features
    everything = replace(batch, features=Feature.SAMPLED | Feature.FILTERED)
    assert torch.equal(sample_on_device(logits, batch), choose(logits, batch))
    assert torch.equal(sample_on_device(logits, everything), choose(logits, batch))


def test_one_scratch_serves_batches_in_turn_and_its_counters_return_to_zero() -> None:
    for rows in (4, 3, 4):
        logits, batch = random_logits(rows, 2500), batch_for(MIXED[:rows])
        assert torch.equal(sample_on_device(logits, batch), choose(logits, batch))
        assert not _scratch(4, 2500, logits.device).counters.any()
    assert _scratch(4, 2500, logits.device).facts.isfinite().any(), "it is the one that was used"


def test_a_border_does_not_depend_on_where_the_tokens_are() -> None:
    """Which program lists its tokens first is a matter of luck on a GPU."""
    logits = random_logits(1, 3000)
    orders = [torch.randperm(3000, generator=torch.Generator().manual_seed(i)).to(DEVICE) for i in range(3)]
    borders = []
    for order in orders:
        sample_on_device(logits[:, order].contiguous(), batch_for([SamplingParams(top_k=900, top_p=0.8)]))
        borders.append(_scratch(1, 3000, logits.device).facts[BORDER.value].item())
    assert len(set(borders)) == 1 and -20.0 < borders[0] < 0.0, borders


@pytest.mark.parametrize("params", [MIXED[:12], [SamplingParams()] * 3, [SamplingParams(temperature=0.0)] * 3])
def test_columns_that_stand_for_tokens_are_chosen_as_the_reference_chooses(params: Sequence[SamplingParams]) -> None:
    logits, batch = random_logits(len(params), 1300), batch_for(params)
    logits[1, 7] = math.nan
    ids = torch.randperm(128_256, generator=torch.Generator().manual_seed(2))[:1300].to(DEVICE)
    got = sample_on_device(logits, batch, ids)
    assert torch.equal(got, choose(logits, batch, ids))
    assert got[1] == NOT_FINITE and torch.isin(got[got >= 0], ids).all()
    if Feature.SAMPLED in batch.features:
        assert not torch.equal(got, ids[sample_on_device(logits, batch)]), "the noise is that of the tokens"


@triton.jit
def write_noise(
    seed_ptr, position_ptr, index_ptr, unit_ptr, noise_ptr, picked_ptr, PURPOSE: tl.constexpr, COUNT: tl.constexpr
):
    row, first = tl.program_id(0), tl.program_id(1) * COUNT
    seed, position = tl.load(seed_ptr + row), tl.load(position_ptr + row)
    column = first + tl.arange(0, COUNT)
    at = row * COUNT * tl.num_programs(1) + column
    tl.store(unit_ptr + at, uniform(seed, position, first, PURPOSE, COUNT))
    tl.store(noise_ptr + at, gumbel(seed, position, first, PURPOSE, COUNT))
    tl.store(picked_ptr + at, gumbel_of(seed, position, tl.load(index_ptr + column), PURPOSE))


@pytest.mark.parametrize("purpose", [philox.SAMPLE, philox.SAMPLE + 1])
def test_uniforms_are_bit_identical_and_gumbels_within_rounding(purpose: int) -> None:
    seeds, positions = column(SEEDS, torch.int64), column([0, 1, 2**31, 2**32 + 5, 7, -1, 3], torch.int64)
    index = torch.randperm(3072, generator=torch.Generator().manual_seed(purpose)).to(DEVICE)
    unit, noise, picked = (torch.empty(len(SEEDS), 3072, device=DEVICE) for _ in range(3))
    write_noise[(len(SEEDS), 3)](
        seeds, positions, index, unit, noise, picked, PURPOSE=purpose, COUNT=1024, enable_fp_fusion=False
    )
    want = philox.uniform(seeds, positions, purpose, 3072)
    assert torch.equal(unit, want)
    assert torch.equal(picked, noise[:, index]), "single entries are those of the whole row"
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
    """Prompt, output and drafts up to the position; what the table holds after it must not be seen."""
    generator = torch.Generator().manual_seed(known)
    text = torch.randint(0, vocab, (5, known + 9), generator=generator).to(DEVICE)
    state = SamplingState(5, DEVICE)
    for row, penalties in enumerate(PENALTIES):
        state.write(row, SamplingParams(**penalties), 0, max(1, known // 2), ())
    rows, drafts = column((4, 0, 2, 2, 1, 3), torch.int64), column((0, 3, 0, 2, 1, 4), torch.int64)
    batch = state.at(rows, known - 1 + drafts, Feature.PENALISED)
    logits = random_logits(6, vocab)
    logits[0, 0], logits[1, 1] = -math.inf, math.nan
    want = logits.clone()
    adjust_(want, batch, state, text, known + 4)
    penalise_on_device(logits, batch, text)
    assert torch.equal(logits.nan_to_num(7.0), want.nan_to_num(7.0))
    assert not torch.equal(logits, random_logits(6, vocab))


def test_a_step_of_all_kinds_gets_the_tokens_and_logits_that_it_gets_without_kernels() -> None:
    kinds: tuple[tuple[dict[str, Any], tuple[int, ...]], ...] = (
        ({"temperature": 0.0}, (3,)), ({"repetition_penalty": 1.4, "presence_penalty": 0.5}, (5, 5, 7)),
        ({"top_k": 5, "frequency_penalty": 0.3, "temperature": 0.7}, ()), ({"logit_bias": {4: 3.0, 90: 1.0}}, (4, 4)),
        ({"min_tokens": 4, "top_p": 0.8}, (1, 2)), ({"min_p": 0.1, "repetition_penalty": 0.8}, (9,)),
    )  # fmt: skip
    requests = [
        Request(SamplingParams(**settings), SEEDS[i], (1, 5, 5, 2 + i), 2, (0, 4), drafts)
        for i, (settings, drafts) in enumerate(kinds)
    ]
    tables = Tables.of(requests, DEVICE)
    logits = random_logits(len(tables.batch.rows), 60)
    tokens, adjusted = tables.choose(logits, on_triton=True)
    want_tokens, want_adjusted = tables.choose(logits)
    assert torch.equal(tokens, want_tokens) and torch.equal(adjusted, want_adjusted)
    assert not torch.equal(adjusted, logits)


def test_parameters_are_gathered_in_one_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of more positions than a program has, among them some of one row; bit for bit as without a kernel."""
    state = SamplingState(len(MIXED) + 1, DEVICE)
    for row, params in enumerate(MIXED):
        state.write(row, params, SEEDS[row % len(SEEDS)], 3 * row, (2,))
    generator = torch.Generator().manual_seed(1)
    rows = torch.randint(len(MIXED) + 1, (150,), generator=generator).to(DEVICE)
    positions = torch.randint(2**40, (150,), generator=generator).to(DEVICE)
    with count_launches() as launches:
        got = state.at(rows, positions, Feature.SAMPLED)
    assert launches.names == ["gather_columns"]
    monkeypatch.setattr(state, "_on_triton", False)
    want = state.at(rows, positions, Feature.SAMPLED)
    assert all(torch.equal(getattr(got, f.name), getattr(want, f.name)) for f in fields(want) if f.name != "features")


@pytest.mark.parametrize("vocab", [1, 31, 32, 33, 1025, 2100])
def test_forbidden_tokens_are_masked_in_their_rows_alone(vocab: int) -> None:
    generator = torch.Generator().manual_seed(vocab)
    logits = torch.randn(5, vocab + 3, generator=generator).to(DEVICE)[:, :vocab]
    words = torch.randint(-(2**31), 2**31, (3, -(-vocab // 32)), dtype=torch.int32, generator=generator).to(DEVICE)
    rows = torch.tensor([4, 0, 2], device=DEVICE)
    want = logits.clone()
    for row, mask in zip(rows.tolist(), words.tolist(), strict=True):
        for token in range(vocab):
            if not mask[token // 32] >> (token % 32) & 1:
                want[row, token] = -math.inf
    beyond = logits.as_strided((5, vocab + 3), logits.stride())[:, vocab:].clone()
    mask_on_device(logits, rows, words)
    assert torch.equal(logits, want)
    assert torch.equal(logits.as_strided((5, vocab + 3), logits.stride())[:, vocab:], beyond)
