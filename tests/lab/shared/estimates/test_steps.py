"""Times of steps and tokens that fit, against what was computed by hand from round numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.models.test_work import HEAD, HIDDEN, KV_HEADS, LAYER, VOCAB, dense, with_experts

from engine.contracts.graph import Graph
from engine.models.layout import Layout
from engine_lab.shared.estimates.collectives import Collectives, Figure, collectives
from engine_lab.shared.estimates.devices import DEVICES, Device, device, device_from
from engine_lab.shared.estimates.efficiency import SERVING, Efficiency, efficiency_from
from engine_lab.shared.estimates.errors import EstimateError
from engine_lab.shared.estimates.steps import Estimate, Memory

CARD = Device("card", memory=2**30, bandwidth=1e9, flops=1e15, link=1e12, source="a test")
"""So slow a memory that it alone counts."""
IDEAL = Efficiency(bandwidth=1.0, layer_us=0.0, flops=1.0)
MEMORY = Memory(fraction=1.0, set_aside=0, block_size=16, max_len=256, step_tokens=64, max_requests=4)


def latency(us: float) -> Collectives:
    """Every sum takes as long."""
    return collectives("ring", 1e30, [Figure("ring", 2, 1, us, "card", "a test")])


def estimate(
    graph: Graph, layout: Layout, us: float = 0.001, efficiency: Efficiency = IDEAL, **more: object
) -> Estimate:
    return Estimate(graph, layout, CARD, latency(us), efficiency, memory=MEMORY, **more)  # type: ignore[arg-type]


def kv(layers: int, tokens: int) -> int:
    return layers * tokens * 2 * KV_HEADS * HEAD * 2


def test_a_decode_step_takes_as_long_as_its_bytes_take_to_read():
    found = estimate(dense(), Layout()).decode(2, 9)
    norms, rows = 2 * HIDDEN * 4, 2 * HIDDEN * 2
    num_bytes = 2 * (2 * LAYER + VOCAB * HIDDEN) + kv(2, 2 * (10 + 1)) + norms + rows
    assert found.ms == pytest.approx(num_bytes / 1e9 * 1e3)
    assert (found.layers, found.exchanging, found.waiting) == (0.0, 0.0, 0.0)


def test_a_prompt_takes_as_long_as_its_products():
    fast = replace(CARD, bandwidth=1e15, flops=1e9)
    found = Estimate(dense(layers=1), Layout(), fast, latency(1), IDEAL).prefill(100)
    flops = 2 * 100 * LAYER + 2 * VOCAB * HIDDEN + 2 * (100 * 101 // 2) * HIDDEN * 2
    assert found.ms == pytest.approx(flops / 1e9 * 1e3, rel=1e-3)


def test_efficiency_divides_rates_and_adds_to_layers():
    plain = estimate(with_experts(), Layout()).decode(1, 9)
    found = estimate(with_experts(), Layout(), efficiency=Efficiency(0.5, layer_us=30, mixture_us=20)).decode(1, 9)
    assert found.reading == pytest.approx(2 * plain.reading)
    assert found.layers == pytest.approx(2 * (30 + 20) / 1e3)
    assert found.ms == pytest.approx(found.reading + found.layers)


def test_tensor_parallelism_adds_up_twice_a_layer_and_three_times_beside():
    found = estimate(dense(), Layout(tp=2), us=50).decode(1, 9)
    embedding_logits_and_choice = 3
    assert found.exchanging == pytest.approx((2 * 2 + embedding_logits_and_choice) * 50 / 1e3)
    twice = estimate(dense(), Layout(tp=2), us=50, efficiency=replace(IDEAL, collective=2.0)).decode(1, 9)
    assert twice.exchanging == pytest.approx(2 * found.exchanging)


def test_the_slowest_rank_of_uneven_shares_counts():
    three, four = (estimate(dense(), Layout(tp=tp)).decode(1, 200).reading for tp in (3, 4))
    two = estimate(dense(), Layout(tp=2)).decode(1, 200).reading
    assert two > three > four
    mean = estimate(dense(), Layout()).decode(1, 200).reading / 3
    assert three > mean * 1.05, "4 key heads over 3 ranks: one of them has 2"


def test_stages_give_one_request_no_latency_and_cost_it_hops():
    whole = estimate(dense(layers=4), Layout()).decode(1, 9).ms
    found = estimate(dense(layers=4), Layout(pp=2), us=50).decode(1, 9)
    assert found.exchanging == pytest.approx(50 / 1e3)
    assert found.ms == pytest.approx(whole + found.exchanging) and found.waiting == 0.0


def test_hops_may_cross_other_links():
    near = estimate(dense(layers=4), Layout(pp=2), us=50)
    far = estimate(dense(layers=4), Layout(pp=2), us=50, hops=latency(500))
    assert far.decode(1, 9).exchanging == pytest.approx(10 * near.decode(1, 9).exchanging)


def test_micro_batches_follow_one_another_through_the_slowest_stage():
    found = estimate(dense(layers=3), Layout(pp=2)).decode(8, 9)
    half = estimate(dense(layers=3), Layout(pp=2)).decode(4, 9)
    one_at_a_time = estimate(dense(layers=3), Layout(pp=2)).prefill(1, 9)
    assert found.waiting > 0.0, "the first stage has two layers, and the last one a head that is less than a layer"
    assert found.reading > half.reading > one_at_a_time.reading
    assert found.ms == pytest.approx(found.reading + found.layers + found.exchanging + found.waiting)


def test_a_batch_no_larger_than_the_stages_is_one_request_each():
    several = estimate(dense(layers=4), Layout(pp=4))
    assert several.decode(3, 9).reading == several.decode(1, 9).reading == several.decode(4, 9).reading


def test_whole_experts_are_uneven_and_cut_ones_are_not():
    cut = estimate(with_experts(), Layout(tp=2)).decode(1, 9).reading
    spread = estimate(with_experts(), Layout(tp=2, ep=2)).decode(1, 9).reading
    assert spread > cut
    many = [estimate(with_experts(), layout).decode(4000, 9).reading for layout in (Layout(tp=2), Layout(tp=2, ep=2))]
    assert many[1] == pytest.approx(many[0], rel=1e-6), "when every expert is read, shares are equal"


def test_times_rise_with_batch_context_and_prompt():
    for layout in (Layout(), Layout(tp=2), Layout(pp=2), Layout(tp=2, pp=2), Layout(tp=4, ep=2)):
        found = estimate(with_experts(), layout)
        batches = [found.decode(batch, 100).ms for batch in range(1, 40)]
        contexts = [found.decode(4, context).ms for context in (0, 1, 10, 100, 1000)]
        prompts = [found.prefill(tokens).ms for tokens in (1, 10, 100, 1000)]
        for times in (contexts, prompts):
            assert times == sorted(times)
        # With stages a batch that they do not divide has a micro-batch that is larger than the others.
        assert batches[:: layout.pp] == sorted(batches[:: layout.pp])


def test_a_faster_device_and_faster_sums_take_no_longer():
    slow = Estimate(dense(), Layout(tp=2), device("A100-80GB"), latency(50), SERVING).decode(8, 100)
    fast = Estimate(dense(), Layout(tp=2), device("H200"), latency(50), SERVING).decode(8, 100)
    sums = Estimate(dense(), Layout(tp=2), device("H200"), latency(5), SERVING).decode(8, 100)
    assert slow.ms > fast.ms > sums.ms


def test_tokens_that_fit_are_what_weights_leave():
    (rank,) = estimate(dense(), Layout()).rank_memory()
    weights = 2 * (2 * LAYER + 2 * VOCAB * HIDDEN) + 2 * HIDDEN * 4
    blocks = (2**30 - weights) // kv(2, 16)
    assert (rank.weights, rank.kv_tokens) == (weights, (blocks - 1) * 16), "one block is padding"


def test_the_rank_with_the_least_room_binds():
    found = estimate(dense(layers=3), Layout(pp=2))
    first, last = found.rank_memory()
    assert first.kv_tokens != last.kv_tokens
    assert found.binding() == min((first, last), key=lambda rank: rank.kv_tokens or 0)


def test_key_heads_on_two_ranks_each_take_their_room_twice():
    four, eight = (estimate(dense(), Layout(tp=tp)).binding().kv_tokens for tp in (4, 8))
    assert four is not None and eight is not None
    assert eight == pytest.approx(four, rel=0.01)


def test_a_model_that_does_not_fit_has_no_tokens():
    small = replace(CARD, memory=1000)
    assert Estimate(dense(), Layout(), small, latency(1), IDEAL, memory=MEMORY).binding().kv_tokens == 0


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        (Layout(tp=16), r"parallelism\.tp=16: .* parallelism\.tp=1, 2, 3, 4.* would fit"),
        (Layout(pp=3), r"parallelism\.pp=3: the model falls into at most 2 stages"),
        (Layout(tp=0), r"parallelism\.tp=0 .* expected at least 1"),
        (Layout(tp=2, ep=2), r"parallelism\.ep=2: the model has no experts"),
    ],
)
def test_a_layout_that_the_model_cannot_have_is_refused(layout, message):
    with pytest.raises(EstimateError, match=message):
        estimate(dense(), layout)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (lambda: device("TPU"), "device 'TPU' is unknown: expected one of L4, A10G"),
        (lambda: device_from([]), r"device: \[\], expected an object"),
        (lambda: device_from({"name": "x"}), "device: memory is missing"),
        (lambda: replace(CARD, bandwidth=0), "bandwidth 0, expected a positive number"),
        (
            lambda: efficiency_from({"bandwidth": 1.5, "layer_us": 1}),
            "bandwidth 1.5, expected more than 0 and at most 1",
        ),
        (lambda: efficiency_from({"bandwidth": 0.5, "layer_us": -1}), "layer_us -1, expected at least 0"),
        (lambda: estimate(dense(), Layout()).decode(0, 9), "a batch of 0 requests"),
        (lambda: estimate(dense(), Layout()).prefill(0), "a prompt of 0 tokens"),
    ],
)
def test_odd_inputs_are_refused(asked, message):
    with pytest.raises(EstimateError, match=message):
        asked()


def test_a_described_device_is_one_like_those_that_are_known():
    known = DEVICES["H100"]
    fields = {"name": "mine", "memory": known.memory, "bandwidth": known.bandwidth, "flops": known.flops}
    mine = device_from({**fields, "link": known.link, "source": "measured"})
    times = [Estimate(dense(), Layout(), one, latency(1), SERVING).decode(1, 9).ms for one in (mine, device("h100"))]
    assert times[0] == times[1]
