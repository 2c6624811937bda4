"""Seeds and random generators."""

from hgrn_vision.randomness import fold


def test_seeds_are_the_same_on_every_machine():
    assert fold(0, 1, 2) == 5458876493991123480
    assert len({fold(a, b) for a in range(40) for b in range(40)}) == 1600
