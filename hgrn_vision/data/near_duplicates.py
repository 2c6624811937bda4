"""Near-duplicate photographs, found by perceptual hashes: images held out for validation must not be trained on."""

import numpy as np
import torch
from PIL import Image

BITS = 256
HASHED_SIDE = 64  # smallest side at which a hash can be trusted
# bits that may differ between duplicates: unrelated photographs differ in about half of all bits, copies that were
# scaled, stretched or compressed again in a few
MOST_DIFFERENT_BITS = 24


def difference_hash(image: Image.Image) -> np.ndarray:
    """(32,) uint8: one bit per cell of a 16 x 16 grid over the whole image, whether it gets brighter to the right."""
    grey = np.asarray(image.convert("L").resize((17, 16), Image.Resampling.BOX), dtype=np.int16)
    return np.packbits(grey[:, 1:] > grey[:, :-1])


def hashes_to_avoid(image: Image.Image) -> np.ndarray:
    """(4, 32) uint8: hashes of the image and its central square, a common crop, each also mirrored."""
    width, height = image.size
    side = min(width, height)
    left, top = (width - side) // 2, (height - side) // 2
    views = [image, image.crop((left, top, left + side, top + side))]
    views += [view.transpose(Image.Transpose.FLIP_LEFT_RIGHT) for view in views]
    return np.stack([difference_hash(view) for view in views])


def nearest(hashes: np.ndarray, others: np.ndarray, block: int = 1024) -> tuple[np.ndarray, np.ndarray]:
    """For each of `hashes` (n, 32), the number of the nearest of `others` (m, 32), and how many bits differ."""
    signs = _signs(others)
    which, bits = np.empty(len(hashes), np.int64), np.empty(len(hashes), np.int64)
    # one buffer for all blocks: in a process that keeps freed memory for training, new ones can add up to many GB
    agreement = torch.empty(block, len(others))
    for start in range(0, len(hashes), block):
        rows = slice(start, start + block)
        mine = _signs(hashes[rows])
        # the dot product of two rows of +1 and -1 is the number of bits that agree minus those that differ
        most, index = torch.mm(mine, signs.T, out=agreement[: len(mine)]).max(dim=1)
        which[rows], bits[rows] = index.numpy(), ((BITS - most) / 2).round().numpy()
    return which, bits


def _signs(hashes: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.unpackbits(hashes, axis=1)).float().mul_(2).sub_(1)
