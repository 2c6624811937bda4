"""HGRN with a simple feature pyramid: maps at four scales for segmentation and detection.

Paper: Exploring Plain Vision Transformer Backbones for Object Detection (ViTDet), ECCV 2022, arXiv 2203.16527. All four
maps come from the tokens after the last block, enlarged by transposed convolutions or pooled. Classification does not
use the pyramid, which gets gradients of zero: it works as in the plain model, whose weights load unchanged.
"""

import logging
from typing import Any

import torch
from timm.layers import LayerNorm2d, register_notrace_module, to_2tuple
from timm.models import build_model_with_cfg, generate_default_cfgs, register_model
from timm.models._features import feature_take_indices
from torch import nn

from .hgrn import HgrnDeit, _cfg
from .weights import checkpoint_filter_fn, missing_pyramid

__all__ = ["HgrnPyramid"]

LEVELS = 4

_logger = logging.getLogger(__name__)


class PyramidLevel(nn.Module):
    """One map from the token grid: resampling, then a 1x1 and a 3x3 convolution, each followed by a norm.

    Args:
        dim: channels of the tokens.
        width: channels of the map.
        scale: side of the map relative to the token grid: 4, 2, 1 or 0.5.
    """

    def __init__(self, dim: int, width: int, scale: float, device=None, dtype=None):
        super().__init__()
        dd = {"device": device, "dtype": dtype}
        channels = dim
        if scale == 4:
            channels = dim // 4
            self.resample = nn.Sequential(
                nn.ConvTranspose2d(dim, dim // 2, 2, stride=2, **dd),
                LayerNorm2d(dim // 2, **dd),
                nn.GELU(),
                nn.ConvTranspose2d(dim // 2, channels, 2, stride=2, **dd),
            )
        elif scale == 2:
            channels = dim // 2
            self.resample = nn.ConvTranspose2d(dim, channels, 2, stride=2, **dd)
        elif scale == 1:
            self.resample = nn.Identity()
        else:
            # an odd last row or column of tokens gets a position of its own
            self.resample = nn.MaxPool2d(2, ceil_mode=True)
        self.proj = nn.Conv2d(channels, width, 1, bias=False, **dd)
        self.norm1 = LayerNorm2d(width, **dd)
        self.conv = nn.Conv2d(width, width, 3, padding=1, bias=False, **dd)
        self.norm2 = LayerNorm2d(width, **dd)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm1(self.proj(self.resample(x)))
        return self.norm2(self.conv(x))


@register_notrace_module
class PyramidLevels(nn.ModuleDict):
    """The levels by number, so that the others keep their names when some are pruned."""

    @torch.jit.ignore
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x, unchanged, but all levels get gradients of zero: DistributedDataParallel waits for every parameter."""
        return x + 0 * sum(p.sum() for p in self.parameters())


class HgrnPyramid(HgrnDeit):
    """HgrnDeit with four feature maps, at a quarter, half, one and two times the patch size: strides 4, 8, 16, 32.

    They have D / 4, D / 2, D and D channels, and each ends in a norm. Images are padded to whole patches; the maps are
    then cropped to what the image covers, ceil(H / stride) by ceil(W / stride).

    Args:
        output_stride: the largest stride of any map, for decoders with dilated convolutions: with 16 the last two maps
            have stride 16, with 8 the last three have stride 8.
        **kwargs: as in HgrnDeit; the patch must be square, its side a multiple of 4.
    """

    def __init__(self, output_stride: int | None = None, device=None, dtype=None, **kwargs):
        super().__init__(device=device, dtype=dtype, **kwargs)
        if self.embed_dim % 4 != 0:
            raise ValueError(f"HgrnPyramid: embed_dim must be a multiple of 4, got {self.embed_dim}")
        patch, D = _square_patch(self.patch_embed.patch_size), self.embed_dim
        strides = [patch // 4, patch // 2, patch, 2 * patch]
        if output_stride is not None:
            if output_stride not in strides:
                raise ValueError(
                    f"HgrnPyramid: output_stride must be one of {', '.join(map(str, strides))}, got {output_stride}"
                )
            strides = [min(stride, output_stride) for stride in strides]
        widths = (D // 4, D // 2, D, D)
        self.scales = [patch / stride for stride in strides]
        self.pyramid = PyramidLevels(
            {
                str(i): PyramidLevel(D, width, scale, device, dtype)
                for i, (width, scale) in enumerate(zip(widths, self.scales, strict=True))
            }
        )
        self.feature_info = [
            dict(module=f"pyramid.{i}", num_chs=width, reduction=stride)
            for i, (width, stride) in enumerate(zip(widths, strides, strict=True))
        ]

    @torch.jit.ignore
    def set_input_size(
        self, img_size: int | tuple[int, int] | None = None, patch_size: int | tuple[int, int] | None = None
    ) -> None:
        """As in HgrnDeit; the strides of the maps grow and shrink with the patch."""
        patch = _square_patch(self.patch_embed.patch_size if patch_size is None else to_2tuple(patch_size))
        super().set_input_size(img_size, patch_size)
        for info, scale in zip(self.feature_info, self.scales, strict=True):
            info["reduction"] = int(patch / scale)

    def forward_intermediates(
        self,
        x: torch.Tensor,
        indices: int | list[int] | None = None,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
        output_dict: bool = False,
    ) -> list[torch.Tensor] | tuple[torch.Tensor, list[torch.Tensor]] | dict[str, Any]:
        """Maps of the pyramid.

        Args:
            x: images (B, C, H, W).
            indices: an int n for the last n maps, None for all four, or a list of map numbers; 0 is the finest.
            norm: apply the final norm to every map, after the map's own.
            stop_early: has no effect, since every map comes from the last block.
            output_fmt: 'NCHW', or 'NLC' for maps as sequences of positions.
            intermediates_only: return no final features.
            output_dict: return a dict with 'image_intermediates' and 'image_features'.
        """
        if output_fmt not in ("NCHW", "NLC"):
            raise ValueError(f"output_fmt must be 'NCHW' or 'NLC', got {output_fmt!r}")
        take_indices, _ = feature_take_indices(LEVELS, indices)
        height, width = x.shape[-2:]
        x = self.forward_features(x)
        grid = self.patch_embed.dynamic_feat_size((height, width))
        last = x.unflatten(1, grid).permute(0, 3, 1, 2).contiguous()  # (B, D, H, W)
        intermediates = []
        for i in sorted(set(take_indices)):
            stride = self.feature_info[i]["reduction"]
            y = self.pyramid[str(i)](last)[..., : -(-height // stride), : -(-width // stride)]
            if norm:
                y = self.norm(y.movedim(1, -1)).movedim(-1, 1)
            intermediates.append(y if output_fmt == "NCHW" else y.flatten(2).transpose(1, 2))
        if output_dict:
            features = {} if intermediates_only else {"image_features": x}
            return {"image_intermediates": intermediates, **features}
        return intermediates if intermediates_only else (x, intermediates)

    def forward_head(self, x: torch.Tensor, pre_logits: bool = False) -> torch.Tensor:
        x = self.pool(x)
        if self.training and not torch.jit.is_scripting():
            x = self.pyramid(x)
        return x if pre_logits else self.head(x)

    @torch.jit.ignore
    def prune_intermediate_layers(
        self, indices: int | list[int] = 1, prune_norm: bool = False, prune_head: bool = True
    ) -> list[int]:
        """Drop the maps that are not requested; all blocks stay, since every map needs them."""
        take_indices, _ = feature_take_indices(LEVELS, indices)
        for i in map(str, range(LEVELS)):
            if int(i) not in take_indices and i in self.pyramid:
                del self.pyramid[i]
        if prune_norm:
            self.norm = nn.Identity()
        if prune_head:
            self.reset_classifier(0, "")
        return take_indices

    def _load_from_state_dict(self, state_dict, prefix, *args):
        """Accept the weights of a plain model; the pyramid then keeps its own."""
        own = self.state_dict()
        new = missing_pyramid(state_dict, own, prefix)
        if new:
            levels = ", ".join(f"pyramid.{i}.*" for i in self.pyramid)
            _logger.warning(
                "the weights have no pyramid: its %d tensors keep their initial values (%s)", len(new), levels
            )
        state_dict.update({prefix + name: own[name] for name in new})
        super()._load_from_state_dict(state_dict, prefix, *args)


def _square_patch(size: tuple[int, int]) -> int:
    """The side of a patch whose quarter is a whole number of pixels."""
    height, width = size
    if height != width or height % 4 != 0:
        raise ValueError(
            f"HgrnPyramid: the patch must be square with a side that is a multiple of 4, got {height}x{width}"
        )
    return height


default_cfgs = generate_default_cfgs(
    {
        "hgrn_pyramid_tiny.untrained": _cfg(),
        "hgrn_pyramid_small.untrained": _cfg(),
    }
)


def _create_hgrn_pyramid(variant: str, pretrained: bool, **kwargs) -> HgrnPyramid:
    out_indices = kwargs.pop("out_indices", (0, 1, 2, 3))
    return build_model_with_cfg(
        HgrnPyramid,
        variant,
        pretrained,
        pretrained_filter_fn=checkpoint_filter_fn,
        feature_cfg=dict(out_indices=out_indices, feature_cls="getter"),
        **kwargs,
    )


@register_model
def hgrn_pyramid_tiny(pretrained: bool = False, **kwargs) -> HgrnPyramid:
    """HGRN-Tiny on 16x16 patches with feature maps at strides 4, 8, 16 and 32."""
    model_args = dict(patch_size=16, embed_dim=192, depth=12)
    return _create_hgrn_pyramid("hgrn_pyramid_tiny", pretrained, **dict(model_args, **kwargs))


@register_model
def hgrn_pyramid_small(pretrained: bool = False, **kwargs) -> HgrnPyramid:
    """HGRN-Small on 16x16 patches with feature maps at strides 4, 8, 16 and 32."""
    model_args = dict(patch_size=16, embed_dim=384, depth=12)
    return _create_hgrn_pyramid("hgrn_pyramid_small", pretrained, **dict(model_args, **kwargs))
