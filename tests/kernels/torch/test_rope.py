"""Rotations: the fast form, the partial form, and positions beyond the trained length."""

from __future__ import annotations

import pytest
import torch

from engine.contracts.ops import RopeFacts
from engine.kernels.torch.rope import Rotary, paired, rotate, rotate_paired


def test_a_rotation_keeps_lengths_and_depends_on_distance_only() -> None:
    rotary = Rotary(RopeFacts(), 16, 128, "cpu")
    q, k = torch.randn(1, 1, 16), torch.randn(1, 1, 16)

    def turned(x: torch.Tensor, position: int) -> torch.Tensor:
        return rotate(x, *rotary.cos_sin(torch.tensor([position]), torch.float32))

    assert torch.allclose(turned(q, 77).norm(), q.norm(), atol=1e-5)
    near, far = (turned(q, 9) * turned(k, 4)).sum(), (turned(q, 105) * turned(k, 100)).sum()
    assert torch.allclose(near, far, atol=1e-4)
    assert not torch.allclose(near, (turned(q, 9) * turned(k, 3)).sum(), atol=1e-3)


def test_the_paired_form_equals_the_plain_one() -> None:
    x = torch.randn(9, 3, 16)
    cos, sin = Rotary(RopeFacts(), 16, 128, "cpu").cos_sin(torch.arange(9), torch.float32)
    assert torch.allclose(rotate_paired(x, *paired(cos, sin)), rotate(x, cos, sin), atol=1e-6)


def test_a_partial_rotation_leaves_the_rest_alone() -> None:
    x = torch.randn(5, 2, 16)
    rotary = Rotary(RopeFacts(rotary_dim=8), 16, 128, "cpu")
    out = rotate(x, *rotary.cos_sin(torch.arange(5) + 1, torch.float32))
    assert torch.equal(out[..., 8:], x[..., 8:])
    assert not torch.equal(out[..., :8], x[..., :8])


def test_a_proportional_rotation_turns_the_first_pairs_of_the_whole_head() -> None:
    """Pairs lie half a head apart, and frequencies are those of the whole head."""
    facts = RopeFacts(kind="proportional", params={"partial_rotary_factor": 0.25, "factor": 2.0})
    angles = Rotary(facts, 16, 128, "cpu").angles(torch.arange(9))
    plain = Rotary(RopeFacts(), 16, 128, "cpu").angles(torch.arange(9))
    assert torch.allclose(angles[:, :2], plain[:, :2] / 2.0) and not angles[:, 2:].any()


LONGROPE = RopeFacts(
    kind="longrope",
    params={
        "original_max_position_embeddings": 32, "max_position_embeddings": 128, "short_factor": [1.0] * 8,
        "long_factor": [4.0] * 8,
    },
)  # fmt: skip


def test_longrope_has_one_set_of_factors_for_all_positions() -> None:
    """The one for the longest sequence that is served: scores depend on distances only."""
    plain = Rotary(RopeFacts(), 16, 128, "cpu").angles(torch.arange(32))
    assert torch.allclose(Rotary(LONGROPE, 16, 32, "cpu").angles(torch.arange(32)), plain)
    for max_len in (33, 128):
        assert torch.allclose(Rotary(LONGROPE, 16, max_len, "cpu").angles(torch.arange(32)), plain / 4.0)


def test_the_amplitude_of_longrope_follows_from_the_checkpoint_alone() -> None:
    amplitudes = [Rotary(LONGROPE, 16, n, "cpu").cos_sin(torch.zeros(1).long(), torch.float32)[0] for n in (16, 128)]
    assert torch.equal(*amplitudes) and not torch.equal(amplitudes[0], torch.ones_like(amplitudes[0]))


def test_dynamic_frequencies_are_plain_ones_up_to_the_stated_length() -> None:
    facts = RopeFacts(kind="dynamic", params={"factor": 4.0, "max_position_embeddings": 32})
    plain = Rotary(RopeFacts(), 16, 32, "cpu").angles(torch.arange(32))
    assert torch.equal(Rotary(facts, 16, 32, "cpu").angles(torch.arange(32)), plain)


def test_an_unknown_kind_is_named() -> None:
    with pytest.raises(ValueError, match="rope_type 'spiral'"):
        Rotary(RopeFacts(kind="spiral"), 16, 128, "cpu")


def test_longrope_factors_of_the_wrong_length_are_named() -> None:
    facts = RopeFacts(kind="longrope", params={"short_factor": [1.0], "long_factor": [1.0]})
    with pytest.raises(ValueError, match="short_factor"):
        Rotary(facts, 16, 128, "cpu")
