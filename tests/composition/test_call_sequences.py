"""What a first call taught never changes what a later one does: random sequences of calls."""

import pytest

from tests.composition.sequences import differences


@pytest.mark.parametrize("first", range(0, 100, 10))
def test_a_sequence_of_calls_is_that_without_remat(first):
    found = [differences(seed, memory=seed % 5 == 0) for seed in range(first, first + 10)]
    assert [what for what in found if what is not None] == []
