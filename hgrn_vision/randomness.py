"""Seeds and random generators; the package seeds generators nowhere else."""

import contextlib
import hashlib
import random
from collections.abc import Iterator

import numpy as np
import torch


def fold(*numbers: int) -> int:
    """One 63-bit seed from several integers, the same on every machine."""
    digest = hashlib.blake2b(repr(numbers).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


@contextlib.contextmanager
def own_generators() -> Iterator[None]:
    """Inside, random, numpy and torch (CPU) may be seeded freely; their states are restored afterwards."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])


def seed_generators(seed: int) -> None:
    """Make all further draws from random, numpy and torch (CPU) depend on `seed` alone."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    # not torch.manual_seed, which keeps a list of every call until CUDA is initialised
    torch.default_generator.manual_seed(seed)


def seed_weights(*numbers: int) -> None:
    """Make the weights that torch draws next (on the CPU) depend on `numbers` alone."""
    torch.default_generator.manual_seed(fold(*numbers))


def numpy_generator(seed: int) -> np.random.RandomState:
    """A generator whose draws depend on `seed` alone, in any version of NumPy."""
    # RandomState rather than Generator: NumPy promises that its numbers never change
    return np.random.RandomState(seed % 2**32)


def torch_generator(seed: int) -> torch.Generator:
    """A CPU generator whose draws depend on `seed` alone."""
    return torch.Generator().manual_seed(seed)


def seed_all(seed: int, device: torch.device) -> None:
    """Seed every generator that mixup, erasing and drop path draw from."""
    seed_generators(seed)
    if device.type != "cpu":
        torch.get_device_module(device).manual_seed(seed)
