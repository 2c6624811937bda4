"""Seeds and random generators."""

import random

import numpy as np
import torch

from hgrn_vision import randomness
from hgrn_vision.randomness import (
    fold,
    numpy_generator,
    own_generators,
    seed_all,
    seed_generators,
    seed_weights,
    torch_generator,
)


def draws():
    """One number of each generator."""
    return random.random(), float(np.random.rand()), torch.rand(1).item()


def test_seeds_are_the_same_on_every_machine():
    assert fold(0, 1, 2) == 5458876493991123480
    assert len({fold(a, b) for a in range(40) for b in range(40)}) == 1600


def test_each_generator_follows_the_seed():
    found = []
    # numpy takes 32 bits of a seed and refuses more
    for seed in (3, 2**62 + 4, 3, 2**62 + 4):
        seed_generators(seed)
        found.append(draws())
    assert found[:2] == found[2:]
    assert not set(found[0]) & set(found[1])


def test_generators_come_back_as_they_were():
    seed_generators(1)
    want = draws()
    seed_generators(1)
    try:
        with own_generators():
            seed_generators(2)
            draws()
            raise KeyboardInterrupt
    except KeyboardInterrupt:
        assert draws() == want


def test_weights_follow_all_their_numbers_and_leave_the_rest_alone():
    seed_generators(1)
    want = draws()[:2]
    weights = []
    for numbers in ((5,), (5, 1), (5,)):
        seed_generators(1)
        seed_weights(*numbers)
        *rest, weight = draws()
        assert tuple(rest) == want
        weights.append(weight)
    assert weights[0] == weights[2] != weights[1]


def test_generators_of_ones_own():
    """NumPy's numbers for a seed are fixed for ever; a seed may have more bits than it takes."""
    assert numpy_generator(2**32 - 1).randint(0, 1000, 3).tolist() == numpy_generator(-1).randint(0, 1000, 3).tolist()
    assert numpy_generator(7).randint(0, 1000, 3).tolist() == np.random.RandomState(7).randint(0, 1000, 3).tolist()
    large = 3 * 2**31
    assert numpy_generator(large).rand() == np.random.RandomState(2**31).rand()
    assert torch.rand(1, generator=torch_generator(9)) == torch.rand(1, generator=torch.Generator().manual_seed(9))


def test_another_device_is_seeded_too(monkeypatch):
    seeded = []

    class Module:
        manual_seed = seeded.append

    monkeypatch.setattr(randomness.torch, "get_device_module", lambda device: Module)
    seed_all(5, torch.device("cpu"))
    assert not seeded
    want = draws()
    seed_all(5, torch.device("cuda"))
    assert seeded == [5] and draws() == want
