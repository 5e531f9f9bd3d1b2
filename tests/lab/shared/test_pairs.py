"""The order of paired runs."""

from engine_lab.shared.pairs import before_first


def test_every_two_pairs_are_abba_or_baab_as_the_seed_says():
    order = before_first("7/a", 40)
    assert all(order[i] != order[i + 1] for i in range(0, 40, 2))
    assert order == before_first("7/a", 40)
    assert order[:10] == before_first("7/a", 10)
    assert order != before_first("8/a", 40)
    assert {order[i] for i in range(0, 40, 2)} == {True, False}
