import pytest
import torch

from engine.sampling.philox import SAMPLE, gumbel, gumbel_at, philox4x32, signed64, uniform

# Random123's published known-answer vectors for philox4x32 with 10 rounds: counter, key, output.
KNOWN_ANSWERS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


def ints(*values):
    return torch.tensor(values, dtype=torch.int64)


@pytest.mark.parametrize("counter, key, expected", KNOWN_ANSWERS)
def test_philox_gives_the_published_answers(counter, key, expected):
    c0, c1, c2, c3 = (ints(word) for word in counter)
    k0, k1 = (ints(word) for word in key)
    assert tuple(int(word) for word in philox4x32((c0, c1, c2, c3), (k0, k1))) == expected


def test_uniform_is_the_documented_mapping_of_the_words():
    got = uniform(ints((0x299F31D0 << 32) | 0xA4093822), ints((7 << 32) | 3), 2, 6)
    key = (ints(0xA4093822), ints(0x299F31D0))
    words = [int(w) for block in (0, 1) for w in philox4x32((ints(block), ints(2), ints(3), ints(7)), key)][:6]
    expected = [(w + 0.5) / 2**32 for w in words]
    torch.testing.assert_close(got[0].double(), torch.tensor(expected, dtype=torch.float64), rtol=1e-6, atol=0)


def test_every_part_of_the_name_changes_the_stream():
    base = uniform(ints(1), ints(1), SAMPLE, 8)
    others = [
        uniform(ints(2), ints(1), SAMPLE, 8),
        uniform(ints(1 + (1 << 32)), ints(1), SAMPLE, 8),
        uniform(ints(1), ints(2), SAMPLE, 8),
        uniform(ints(1), ints(1 + (1 << 32)), SAMPLE, 8),
        uniform(ints(1), ints(1), SAMPLE + 1, 8),
    ]
    assert all(not torch.equal(base, other) for other in others)


@pytest.mark.parametrize("n", [5, 20_000])
def test_a_row_does_not_depend_on_its_neighbours(n):
    seeds, positions = ints(11, -5, 1 << 62), ints(0, 9, 4)
    together = gumbel(seeds, positions, SAMPLE, n)
    for i in range(3):
        torch.testing.assert_close(together[i : i + 1], gumbel(seeds[i : i + 1], positions[i : i + 1], SAMPLE, n))


def test_a_longer_draw_only_adds_numbers():
    assert torch.equal(uniform(ints(3), ints(4), 0, 100)[:, :37], uniform(ints(3), ints(4), 0, 37))


def test_single_entries_are_those_of_the_whole_row():
    index = torch.tensor([0, 1, 2, 3, 4, 97, 998, 999])
    seeds, positions = torch.full_like(index, 5), torch.full_like(index, 6)
    whole = gumbel(ints(5), ints(6), SAMPLE, 1000)[0]
    torch.testing.assert_close(gumbel_at(seeds, positions, SAMPLE, index), whole[index])


def test_uniform_is_open_and_even():
    u = uniform(torch.arange(16), torch.zeros(16, dtype=torch.int64), SAMPLE, 4096).double()
    assert u.min() > 0.0 and u.max() < 1.0
    count = torch.histc(u, bins=64, min=0.0, max=1.0)
    expected = u.numel() / 64
    assert float(((count - expected) ** 2 / expected).sum()) < 110  # 63 degrees of freedom: p ~ 2e-4
    assert abs(float(u.mean()) - 0.5) < 4 * (1 / 12 / u.numel()) ** 0.5


def test_gumbel_has_its_mean_and_variance():
    g = gumbel(torch.arange(16), torch.zeros(16, dtype=torch.int64), SAMPLE, 4096).double()
    assert torch.isfinite(g).all()
    assert abs(float(g.mean()) - 0.5772) < 0.02
    assert abs(float(g.var()) - 1.6449) < 0.06


@pytest.mark.parametrize("seed, held", [(0, 0), (2**63, -(2**63)), (2**64 - 1, -1), (-1, -1), (2**63 - 1, 2**63 - 1)])
def test_any_64_bit_seed_fits_an_int64(seed, held):
    assert signed64(seed) == held
