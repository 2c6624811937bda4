"""Images in files of every layout, and settings to open them with."""

import io
import tarfile

import torch
from PIL import Image

from hgrn_vision.data.loaders import TrainLoader
from hgrn_vision.data.spec import DataSpec
from hgrn_vision.train.config import TrainConfig

SPEC = DataSpec((3, 8, 8), (0.5, 0.4, 0.3), (0.3, 0.2, 0.1), "bicubic", 1.0)
SMALL = dict(batch_size=64, micro_batch=16, workers=0)


def config(**settings) -> TrainConfig:
    return TrainConfig(**{**SMALL, **settings})


def png(color) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (6, 5), color).save(buffer, "PNG")
    return buffer.getvalue()


def write(path, content: bytes = b"") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content or png((len(path.name), 0, 0)))


def tree(root, **classes: int) -> str:
    """Class folders with this many images each, the class's number as their red value."""
    for number, (name, count) in enumerate(classes.items()):
        for i in range(count):
            write(root / name / f"{i}.png", png((number * 10, i, 0)))
    return str(root)


def flat(loader: TrainLoader, epoch: int = 0, **position) -> tuple[torch.Tensor, torch.Tensor]:
    batches = [batch for step in loader.epoch(epoch, **position) for batch in step]
    loader.close()
    return torch.cat([b.images for b in batches]), torch.cat([b.targets for b in batches])


def write_tar(path, members: dict[str, bytes]) -> bytes:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as tar:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return path.read_bytes()
