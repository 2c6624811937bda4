"""Made-up photographs."""

import numpy as np
from PIL import Image


def scene(seed, size=(96, 72)):
    """Smooth blobs of colour with some detail, as photographs have."""
    draw = np.random.RandomState(seed)
    coarse = Image.fromarray(draw.randint(0, 256, (6, 8, 3)).astype(np.uint8)).resize(size, Image.BICUBIC)
    detail = Image.fromarray(draw.randint(0, 256, (24, 32, 3)).astype(np.uint8)).resize(size, Image.BICUBIC)
    return Image.blend(coarse, detail, 0.3)


def write_scenes(folder, seeds):
    """A folder of photographs, named after their seeds."""
    folder.mkdir(parents=True)
    for seed in seeds:
        scene(seed).save(folder / f"{seed:02}.png")
    return str(folder)
