"""Copies of a photograph are found however they were scaled, stretched, cropped or mirrored; others are not."""

import io

import numpy as np
import pytest
from photographs import scene
from PIL import Image

from hgrn_vision.data.near_duplicates import MOST_DIFFERENT_BITS, difference_hash, hashes_to_avoid, nearest


def compress(image, quality):
    file = io.BytesIO()
    image.save(file, "JPEG", quality=quality)
    return Image.open(file)


def test_a_hash_says_where_it_gets_brighter():
    ramp = Image.fromarray(np.tile(np.arange(170, dtype=np.uint8), (160, 1)))
    assert (difference_hash(ramp) == 255).all()
    assert (difference_hash(ramp.transpose(Image.Transpose.FLIP_LEFT_RIGHT)) == 0).all()


def test_nearest_counts_the_bits_that_differ():
    draw = np.random.RandomState(0)
    hashes, others = draw.randint(0, 256, (37, 32), dtype=np.uint8), draw.randint(0, 256, (11, 32), dtype=np.uint8)
    others[4] = hashes[20]
    others[4, 3] ^= 0b101
    by_hand = np.unpackbits(hashes[:, None] ^ others[None], axis=2).sum(axis=2)
    which, bits = nearest(hashes, others, block=10)
    assert np.array_equal(bits, by_hand.min(axis=1))
    assert np.array_equal(which, by_hand.argmin(axis=1))
    assert (which[20], bits[20]) == (4, 2)


COPIES = {
    "smaller": lambda image: image.resize((48, 36), Image.BICUBIC),
    "stretched to a square": lambda image: image.resize((64, 64), Image.BICUBIC),
    "central square": lambda image: image.crop((12, 0, 84, 72)).resize((64, 64), Image.BICUBIC),
    "mirrored": lambda image: image.transpose(Image.Transpose.FLIP_LEFT_RIGHT),
    "darker": lambda image: image.point(lambda value: value * 0.7),
    "compressed hard": lambda image: compress(image, quality=20),
}


@pytest.mark.parametrize("copy", COPIES)
def test_copies_are_found_and_strangers_are_not(copy):
    held_out = np.concatenate([hashes_to_avoid(scene(seed)) for seed in range(20)])
    photos = np.stack([difference_hash(COPIES[copy](scene(seed))) for seed in range(40)])
    which, bits = nearest(photos, held_out)
    assert (bits[:20] <= MOST_DIFFERENT_BITS).all()
    assert np.array_equal(which[:20] // 4, np.arange(20))
    assert (bits[20:] > MOST_DIFFERENT_BITS).all()
