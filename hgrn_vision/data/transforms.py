"""Augmentation with timm's transforms: single images in the loader processes, whole micro-batches on the device."""

import itertools
from collections.abc import Callable

import torch
from PIL import Image
from timm.data import Mixup, create_transform
from timm.data.auto_augment import posterize
from timm.data.mixup import mixup_target
from timm.data.random_erasing import RandomErasing
from torch.nn.functional import interpolate
from torchvision.transforms import Compose, Grayscale

from .spec import DataSettings, DataSpec


def train_transform(config: DataSettings, spec: DataSpec) -> Callable[[Image.Image], torch.Tensor]:
    """Random crop, flips and auto-augment policy: RGB image -> uint8 (C, H, W)."""
    return _transform(
        spec,
        is_training=True,
        scale=config.scale,
        ratio=config.ratio,
        hflip=config.hflip,
        vflip=config.vflip,
        color_jitter=config.color_jitter or None,
        auto_augment=config.auto_augment or None,
    )


def eval_transform(spec: DataSpec) -> Callable[[Image.Image], torch.Tensor]:
    """Resize and centre crop: RGB image -> uint8 (C, H, W)."""
    return _transform(spec, crop_pct=spec.crop_pct)


def _transform(spec: DataSpec, **options) -> Callable[[Image.Image], torch.Tensor]:
    channels = spec.input_size[0]
    if channels not in (1, 3):
        raise ValueError(f"images have 1 or 3 channels, the model expects {channels}")
    transform = create_transform(
        spec.input_size,
        interpolation=spec.interpolation,
        mean=spec.mean * (3 // len(spec.mean)),
        use_prefetcher=True,  # leaves the result in bytes
        **options,
    )
    _allow_zero_bits(transform)
    if channels == 1:
        # on the image, before it becomes a tensor: torchvision's version for tensors rounds down
        transform.transforms.insert(-1, Grayscale())
    return transform


def _allow_zero_bits(transform: Compose) -> None:
    """Let timm's policies posterise to 0 bits, which gives a black image: Pillow 13 refuses to."""
    for policy in transform.transforms:
        chains = getattr(policy, "policy", None) or [getattr(policy, "ops", [])]
        for op in itertools.chain.from_iterable(chains):
            if op.aug_fn is posterize:
                op.aug_fn = _posterize


def _posterize(image: Image.Image, bits: int, **options) -> Image.Image:
    return posterize(image, bits, **options) if bits else Image.new(image.mode, image.size)


class BatchTransform:
    """What happens to a micro-batch on the device: normalisation, random erasing, mixup or cutmix, soft targets."""

    def __init__(self, config: DataSettings, spec: DataSpec, num_classes: int):
        self.spec = spec
        self.num_classes = num_classes
        self.smoothing = config.smoothing
        # 'pixel' is DeiT's choice: noise instead of a flat colour
        self.erase = RandomErasing(config.reprob, mode="pixel", device="cpu") if config.reprob else None
        self.mix = None
        if config.mixup or config.cutmix:
            self.mix = Mixup(
                mixup_alpha=config.mixup,
                cutmix_alpha=config.cutmix,
                prob=config.mixup_prob,
                switch_prob=config.mixup_switch,
                mode=config.mixup_mode,
                label_smoothing=config.smoothing,
                num_classes=num_classes,
            )

    def train(self, images: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(B, C, H, W) uint8, (B,) int64 -> float images, (B, classes) targets; draws from the global generators."""
        images = self.eval(images)
        if self.erase:
            self.erase.device = images.device
            images = self.erase(images)
        if self.mix:
            return self.mix(images, targets)
        return images, mixup_target(targets, self.num_classes, smoothing=self.smoothing)

    def eval(self, images: torch.Tensor) -> torch.Tensor:
        """(B, C, H, W) uint8 -> normalised float images."""
        return normalise(images, self.spec)


def normalise(images: torch.Tensor, spec: DataSpec, scale: int = 255) -> torch.Tensor:
    """Pixels (..., C, H, W) from 0 to `scale` as normalised float images, as `spec` says."""
    mean, std = _statistics(images, spec)
    return images.float().div(scale).sub_(mean).div_(std)


def unnormalise(images: torch.Tensor, spec: DataSpec) -> torch.Tensor:
    """The inverse of `normalise`: pixels from 0 to 1."""
    mean, std = _statistics(images, spec)
    return images * std + mean


def _statistics(images: torch.Tensor, spec: DataSpec) -> tuple[torch.Tensor, torch.Tensor]:
    mean, std = (torch.tensor(values, device=images.device).view(-1, 1, 1) for values in (spec.mean, spec.std))
    return mean, std


def resize(images: torch.Tensor, size: tuple[int, int]) -> torch.Tensor:
    """Images (B, C, H, W) at another size, without aliasing."""
    if tuple(images.shape[-2:]) == tuple(size):
        return images
    return interpolate(images, size=tuple(size), mode="bilinear", antialias=True, align_corners=False)
