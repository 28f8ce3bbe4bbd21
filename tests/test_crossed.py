"""That no pair of settings is left out by the tests that leave out triples."""

from __future__ import annotations

from itertools import combinations, product

import pytest
from crossed import each_pair


@pytest.mark.parametrize("sizes", [(2, 2, 2), (7, 2, 2), (3, 3, 2), (3, 4, 3)])
def test_every_two_values_meet(sizes: tuple[int, int, int]) -> None:
    first, second, third = (range(size) for size in sizes)
    triples = each_pair(first, second, third)
    assert len(triples) == len(first) * len(second)
    for (i, one), (j, other) in combinations(enumerate((first, second, third)), 2):
        assert {(triple[i], triple[j]) for triple in triples} == set(product(one, other))
