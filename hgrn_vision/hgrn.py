"""HGRN vision models: DeiT-shaped networks with the HGRU token mixer instead of attention.

Paper: Hierarchically Gated Recurrent Neural Network for Sequence Modeling, NeurIPS 2023, arXiv 2311.04823.
Images are cut into patches. There is no position embedding, since the rotation of the recurrence carries relative
position, and no class token. The order is patches, blocks, mean over tokens, RMS norm, linear head.
"""

from collections.abc import Iterator
from typing import Any

import torch
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.layers import (
    LayerType,
    calculate_drop_path_rates,
    get_act_layer,
    get_device_dtype,
    get_norm_layer,
    register_notrace_function,
    to_2tuple,
)
from timm.layers.pool1d import global_pool_nlc
from timm.models import build_model_with_cfg, generate_default_cfgs, register_model, resolve_pretrained_cfg
from timm.models._features import feature_take_indices
from timm.models._manipulate import checkpoint
from torch import nn

from .block import Block
from .layers import (
    FORGET_GATES,
    LOWER_BOUNDS,
    AblatedHgru,
    Hgru,
    PaddedPatchEmbed,
    Recurrence,
    RmsNorm,
    check_choice,
    lower_bounds,
    zero_bounds,
)
from .packaged import STARTER, check_packaged, weights_file
from .weights import checkpoint_filter_fn

__all__ = ["HgrnDeit"]

POOLS = ("", "avg", "max", "avgmax")


class HgrnDeit(nn.Module):
    """DeiT with HGRU token mixers.

    Images whose sides are not multiples of the patch size are padded at the bottom and right with zeros, which is the
    mean colour of normalised images. A partly padded patch is a token like any other: it is scanned, pooled, and part
    of the feature maps, which are ceil(H / patch) by ceil(W / patch). No patch is all padding.

    Args:
        img_size: image side, or (height, width).
        patch_size: patch side, or (height, width).
        in_chans: channels of the image.
        num_classes: outputs of the head, 0 for none.
        global_pool: 'avg', 'max', 'avgmax', or '' for none, which applies the head to every token.
        embed_dim: width D.
        depth: number of blocks.
        mlp_ratio: hidden width of the GLU, as a multiple of D.
        drop_rate: dropout before the head.
        proj_drop_rate: dropout after each mixer and each GLU.
        drop_path_rate: stochastic depth of the last block; it grows linearly from 0 at the first block.
        dynamic_img_size: accept images of any size, not only img_size.
        dynamic_img_pad: pad images to whole patches; False refuses images that would need padding.
        norm_layer: replaces every LayerNorm.
        act_layer: replaces the SiLU of the GLUs.
        input_gate: False feeds the recurrence c_t instead of (1 - decay) c_t.
        output_gate: False leaves out the gate on the states.
        gate_after_norm: a SiLU gate after the norm of the states, as in the authors' released image models.
        forget_gate: 'full'; 'bound_only', where the decay is the lower bound; 'none', where decay and input gate are 1.
        lower_bound: 'increasing' with depth, 'decreasing', 'independent' for each layer, or 'none'.
        complex_state: False keeps the rotation at zero.
        data_dependent_theta: True makes the rotation a projection of the token.
        bidirectional: False scans only from the first token to the last; with scan='2d', to the right and downwards.
        scan: '1d' scans all tokens, row after row; '2d' scans the rows and the columns of the image and sums their
            states, as the authors' code for the image tasks of Long Range Arena does. The parameters are the same.
        local_conv: kernel size, 3 or 5, of a depthwise convolution over the token grid before each mixer's projection,
            which starts as the identity; 0 for none.
    """

    dynamic_img_size: torch.jit.Final[bool]

    def __init__(
        self,
        img_size: int | tuple[int, int] = 224,
        patch_size: int | tuple[int, int] = 16,
        in_chans: int = 3,
        num_classes: int = 1000,
        global_pool: str = "avg",
        embed_dim: int = 192,
        depth: int = 12,
        mlp_ratio: float = 2.0,
        drop_rate: float = 0.0,
        proj_drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
        dynamic_img_size: bool = True,
        dynamic_img_pad: bool = True,
        norm_layer: LayerType | None = None,
        act_layer: LayerType | None = None,
        input_gate: bool = True,
        output_gate: bool = True,
        gate_after_norm: bool = False,
        forget_gate: str = "full",
        lower_bound: str = "increasing",
        complex_state: bool = True,
        data_dependent_theta: bool = False,
        bidirectional: bool = True,
        scan: str = "1d",
        local_conv: int = 0,
        device=None,
        dtype=None,
    ):
        super().__init__()
        dd = {"device": device, "dtype": dtype}
        check_choice("HgrnDeit: global_pool", global_pool, POOLS)
        check_choice("HgrnDeit: forget_gate", forget_gate, FORGET_GATES)
        check_choice("HgrnDeit: lower_bound", lower_bound, LOWER_BOUNDS)
        _check_ablations(output_gate, gate_after_norm, forget_gate, lower_bound, complex_state, data_dependent_theta)
        norm_layer = get_norm_layer(norm_layer) or nn.LayerNorm
        act_layer = get_act_layer(act_layer) or nn.SiLU

        self.num_classes = num_classes
        self.in_chans = in_chans
        self.global_pool = global_pool
        self.num_features = self.head_hidden_size = self.embed_dim = embed_dim
        self.num_prefix_tokens = 0
        self.depth = depth
        self.dynamic_img_size = dynamic_img_size
        self.grad_checkpointing = False

        self.patch_embed = PaddedPatchEmbed(
            img_size=img_size,
            patch_size=patch_size,
            in_chans=in_chans,
            embed_dim=embed_dim,
            strict_img_size=not dynamic_img_size,
            dynamic_img_pad=dynamic_img_pad,
            **dd,
        )
        self.lower_bound_kind = lower_bound
        has_bounds = lower_bound != "none" and forget_gate != "none"
        self.lower_bound = nn.Parameter(torch.ones(depth, embed_dim, **dd)) if has_bounds else None

        mixer_args = dict(
            bidirectional=bidirectional,
            output_gate=output_gate,
            gate_after_norm=gate_after_norm,
            complex_state=complex_state,
            scan=scan,
            local_conv=local_conv,
            proj_drop=proj_drop_rate,
            norm_layer=norm_layer,
            **dd,
        )
        mixer_class = Hgru
        if not input_gate or forget_gate != "full" or data_dependent_theta:
            mixer_class = AblatedHgru
            mixer_args.update(input_gate=input_gate, forget_gate=forget_gate, data_dependent_theta=data_dependent_theta)
        self.blocks = nn.ModuleList(
            Block(mixer_class(embed_dim, **mixer_args), mlp_ratio, proj_drop_rate, rate, norm_layer, act_layer, **dd)
            for rate in calculate_drop_path_rates(drop_path_rate, depth)
        )
        reduction = self.patch_embed.feat_ratio()
        self.feature_info = [dict(module=f"blocks.{i}", num_chs=embed_dim, reduction=reduction) for i in range(depth)]
        self.norm = RmsNorm()
        self.head_drop = nn.Dropout(drop_rate)
        self.head = nn.Linear(embed_dim, num_classes, **dd) if num_classes > 0 else nn.Identity()

    @torch.jit.ignore
    def init_weights(self) -> None:
        """Set every parameter to its initial value, for example after creation on the meta device."""
        if self.lower_bound is not None:
            nn.init.ones_(self.lower_bound)
        for module in self.modules():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()

    @torch.jit.ignore
    def no_weight_decay(self) -> set[str]:
        """Gamma and theta: they are not matmul weights."""
        return {name for name, _ in self.named_parameters() if name == "lower_bound" or name.endswith("mixer.theta")}

    @torch.jit.ignore
    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Parameter groups for layer-wise decay; Gamma is shared by all blocks and counts as part of the stem."""
        return dict(stem=r"^patch_embed|^lower_bound", blocks=[(r"^blocks\.(\d+)", None)])

    @torch.jit.ignore
    def set_grad_checkpointing(self, enable: bool = True) -> None:
        self.grad_checkpointing = enable

    @torch.jit.ignore
    def get_classifier(self) -> nn.Module:
        return self.head

    @torch.jit.ignore
    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """Replace the head with a new one for `num_classes` classes (0: none), and the pooling if one is given."""
        if global_pool is not None:
            check_choice("HgrnDeit: global_pool", global_pool, POOLS)
            self.global_pool = global_pool
        self.num_classes = num_classes
        dd = get_device_dtype(self)
        self.head = nn.Linear(self.embed_dim, num_classes, **dd) if num_classes > 0 else nn.Identity()
        self.head.train(self.training)

    @torch.jit.ignore
    def set_input_size(
        self, img_size: int | tuple[int, int] | None = None, patch_size: int | tuple[int, int] | None = None
    ) -> None:
        """Change the image size, the patch size (the projection is resampled), or both."""
        self.patch_embed.set_input_size(None if img_size is None else to_2tuple(img_size), patch_size)
        for info in self.feature_info:
            info["reduction"] = self.patch_embed.feat_ratio()

    def layer_bounds(self) -> torch.Tensor:
        """The lower bound of every layer's forget gate, (depth, D), in float32 or float64."""
        if self.lower_bound is None:
            return zero_bounds(self.patch_embed.proj.weight, self.depth)
        return lower_bounds(self.lower_bound, self.lower_bound_kind)

    @torch.jit.ignore
    def recurrences(self, x: torch.Tensor) -> Iterator[Recurrence]:
        """The intermediate values of each block's scan for images (B, C, H, W), block by block."""
        x, grid = self.embed(x)
        for block, bound in zip(self.blocks, self.layer_bounds(), strict=False):
            yield block.mixer.recurrence(block.norm1(x), bound, grid)
            x = block(x, bound, grid)

    @torch.jit.ignore
    def forget_gates(self, x: torch.Tensor) -> list[torch.Tensor]:
        """The decay of every token in every block for images (B, C, H, W), each (B, T, D)."""
        return [recurrence.decay for recurrence in self.recurrences(x)]

    def embed(self, x: torch.Tensor) -> tuple[torch.Tensor, tuple[int, int]]:
        """The tokens (B, T, D) of images, and their grid: rows and columns of patches."""
        pad = self.patch_embed.dynamic_img_pad
        check_image(
            x, self.in_chans, self.patch_embed.patch_size, self.patch_embed.img_size, self.dynamic_img_size, pad
        )
        # contiguous: all following matmuls and scans run along a token's channels
        x = self.patch_embed(x).contiguous()
        return x.flatten(1, 2), (x.shape[1], x.shape[2])

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
        """Features after chosen blocks.

        Args:
            x: images (B, C, H, W).
            indices: an int n for the last n blocks, None for all, or a list of block numbers.
            norm: apply the final norm to every intermediate.
            stop_early: run no block after the last requested one.
            output_fmt: 'NCHW' for maps over the patch grid, padded patches included, or 'NLC' for tokens.
            intermediates_only: return no final features.
            output_dict: return a dict with 'image_intermediates' and 'image_features'.
        """
        if output_fmt not in ("NCHW", "NLC"):
            raise ValueError(f"output_fmt must be 'NCHW' or 'NLC', got {output_fmt!r}")
        take_indices, max_index = feature_take_indices(len(self.blocks), indices)
        x, grid = self.embed(x)
        bounds = self.layer_bounds()
        intermediates = []
        for i, block in enumerate(self.blocks[: max_index + 1] if stop_early else self.blocks):
            x = self.run_block(block, x, bounds[i], grid)
            if i in take_indices:
                intermediates.append(self.norm(x) if norm else x)
        if output_fmt == "NCHW":
            intermediates = [y.unflatten(1, grid).permute(0, 3, 1, 2).contiguous() for y in intermediates]
        if output_dict:
            features = {} if intermediates_only else {"image_features": x}
            return {"image_intermediates": intermediates, **features}
        return intermediates if intermediates_only else (x, intermediates)

    @torch.jit.ignore
    def prune_intermediate_layers(
        self, indices: int | list[int] = 1, prune_norm: bool = False, prune_head: bool = True
    ) -> list[int]:
        """Drop the blocks after the last requested one; Gamma is kept whole, so lower bounds do not change."""
        take_indices, max_index = feature_take_indices(len(self.blocks), indices)
        self.blocks = self.blocks[: max_index + 1]
        if prune_norm:
            self.norm = nn.Identity()
        if prune_head:
            self.reset_classifier(0, "")
        return take_indices

    def run_block(
        self, block: nn.Module, x: torch.Tensor, lower_bound: torch.Tensor, grid: tuple[int, int]
    ) -> torch.Tensor:
        if self.grad_checkpointing and torch.is_grad_enabled():
            return checkpoint(block, x, lower_bound, grid)
        return block(x, lower_bound, grid)

    def forward_features(self, x: torch.Tensor) -> torch.Tensor:
        """The tokens after the last block, (B, T, D); the norm comes later, after pooling."""
        x, grid = self.embed(x)
        bounds = self.layer_bounds()
        for i, block in enumerate(self.blocks):
            # TorchScript cannot pass a module to a function
            x = block(x, bounds[i], grid) if torch.jit.is_scripting() else self.run_block(block, x, bounds[i], grid)
        return x

    def forward_head(self, x: torch.Tensor, pre_logits: bool = False) -> torch.Tensor:
        x = self.pool(x)
        return x if pre_logits else self.head(x)

    def pool(self, x: torch.Tensor) -> torch.Tensor:
        """One vector per image, (B, D), of tokens (B, T, D)."""
        x = global_pool_nlc(x, pool_type=self.global_pool, num_prefix_tokens=0)
        return self.head_drop(self.norm(x))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.forward_head(self.forward_features(x))


def _check_ablations(output_gate, gate_after_norm, forget_gate, lower_bound, complex_state, data_dependent_theta):
    if gate_after_norm and not output_gate:
        raise ValueError("HgrnDeit: gate_after_norm=True needs output_gate=True")
    if forget_gate == "bound_only" and lower_bound == "none":
        raise ValueError("HgrnDeit: forget_gate='bound_only' needs a lower_bound; without one the decay is 0")
    if data_dependent_theta and not complex_state:
        raise ValueError("HgrnDeit: data_dependent_theta=True needs complex_state=True")


@register_notrace_function
def check_image(
    x: torch.Tensor,
    in_chans: int,
    patch_size: tuple[int, int],
    img_size: tuple[int, int],
    dynamic_img_size: bool,
    dynamic_img_pad: bool,
) -> None:
    """Refuse images that the patch embedding cannot take; not traced, so that traced models have no shape checks."""
    if x.dim() != 4:
        raise ValueError(f"expected images of shape (B, {in_chans}, H, W), got a tensor with {x.dim()} dimensions")
    B, C, H, W = x.shape
    if in_chans != C:
        raise ValueError(f"expected images with {in_chans} channels, got {C}")
    if H == 0 or W == 0:
        raise ValueError(f"an image of {H}x{W} pixels has no tokens")
    if not dynamic_img_size:
        if img_size[0] != H or img_size[1] != W:
            raise ValueError(
                f"image of {H}x{W} pixels does not match the model's {img_size[0]}x{img_size[1]}; "
                "create the model with dynamic_img_size=True to take any size"
            )
    elif not dynamic_img_pad and (H % patch_size[0] != 0 or W % patch_size[1] != 0):
        raise ValueError(
            f"image of {H}x{W} pixels is not a multiple of the patch {patch_size[0]}x{patch_size[1]}; "
            "resize it or create the model with dynamic_img_pad=True"
        )


def _cfg(**kwargs) -> dict[str, Any]:
    return {
        "url": "",
        "num_classes": 1000,
        "input_size": (3, 224, 224),
        "pool_size": None,
        "crop_pct": 0.9,
        "interpolation": "bicubic",
        "fixed_input_size": False,
        "mean": IMAGENET_DEFAULT_MEAN,
        "std": IMAGENET_DEFAULT_STD,
        "first_conv": "patch_embed.proj",
        "classifier": "head",
        "license": "apache-2.0",
        "paper_ids": "arXiv:2311.04823",
        "paper_name": "Hierarchically Gated Recurrent Neural Network for Sequence Modeling",
        **kwargs,
    }


default_cfgs = generate_default_cfgs(
    {
        # the image size at the end of its training; the classes are ImageNet's
        STARTER: _cfg(file=weights_file(STARTER), input_size=(3, 112, 112)),
        "hgrn_deit_tiny.untrained": _cfg(),
        "hgrn_deit_small.untrained": _cfg(),
        "hgrn_deit_base.untrained": _cfg(),
        "hgrn_deit_tiny_patch16_224.untrained": _cfg(),
        "hgrn_deit_small_patch16_224.untrained": _cfg(),
        "hgrn_deit_base_patch16_224.untrained": _cfg(),
        "hgrn2d_deit_tiny.untrained": _cfg(),
        "hgrn2d_deit_small.untrained": _cfg(),
        "hgrn2d_deit_tiny_patch16_224.untrained": _cfg(),
        "hgrn2d_deit_small_patch16_224.untrained": _cfg(),
        "hgrn1d_vit_tiny.untrained": _cfg(crop_pct=0.875),
        "hgrn1d_vit_small.untrained": _cfg(crop_pct=0.875),
    }
)


def _create_hgrn_deit(variant: str, pretrained: bool, **kwargs) -> HgrnDeit:
    out_indices = kwargs.pop("out_indices", 3)
    if pretrained:
        overlay = kwargs.get("pretrained_cfg_overlay")
        source = resolve_pretrained_cfg(variant, kwargs.get("pretrained_cfg"), overlay and dict(overlay))
        if source.file and not source.state_dict:
            check_packaged(source.file)
    elif not kwargs.get("pretrained_cfg"):
        # untrained models use the paper's image size, not that of the packaged weights
        kwargs["pretrained_cfg"] = "untrained"
    return build_model_with_cfg(
        HgrnDeit,
        variant,
        pretrained,
        pretrained_filter_fn=checkpoint_filter_fn,
        feature_cfg=dict(out_indices=out_indices, feature_cls="getter"),
        **kwargs,
    )


@register_model
def hgrn_deit_tiny(pretrained: bool = False, **kwargs) -> HgrnDeit:
    """HGRN-Tiny: 12 blocks of width 192 on 14x14 patches, 6.1M parameters (paper, table 7)."""
    model_args = dict(patch_size=14, embed_dim=192, depth=12)
    return _create_hgrn_deit("hgrn_deit_tiny", pretrained, **dict(model_args, **kwargs))


@register_model
def hgrn_deit_small(pretrained: bool = False, **kwargs) -> HgrnDeit:
    """HGRN-Small: 12 blocks of width 384 on 14x14 patches, 23.7M parameters (paper, table 7)."""
    model_args = dict(patch_size=14, embed_dim=384, depth=12)
    return _create_hgrn_deit("hgrn_deit_small", pretrained, **dict(model_args, **kwargs))


@register_model
def hgrn_deit_base(pretrained: bool = False, **kwargs) -> HgrnDeit:
    """HGRN-Base: 12 blocks of width 768 on 14x14 patches."""
    model_args = dict(patch_size=14, embed_dim=768, depth=12)
    return _create_hgrn_deit("hgrn_deit_base", pretrained, **dict(model_args, **kwargs))


@register_model
def hgrn_deit_tiny_patch16_224(pretrained: bool = False, **kwargs) -> HgrnDeit:
    """HGRN-Tiny on the 16x16 patches of DeiT."""
    model_args = dict(patch_size=16, embed_dim=192, depth=12)
    return _create_hgrn_deit("hgrn_deit_tiny_patch16_224", pretrained, **dict(model_args, **kwargs))


@register_model
def hgrn_deit_small_patch16_224(pretrained: bool = False, **kwargs) -> HgrnDeit:
    """HGRN-Small on the 16x16 patches of DeiT."""
    model_args = dict(patch_size=16, embed_dim=384, depth=12)
    return _create_hgrn_deit("hgrn_deit_small_patch16_224", pretrained, **dict(model_args, **kwargs))


@register_model
def hgrn_deit_base_patch16_224(pretrained: bool = False, **kwargs) -> HgrnDeit:
    """HGRN-Base on the 16x16 patches of DeiT."""
    model_args = dict(patch_size=16, embed_dim=768, depth=12)
    return _create_hgrn_deit("hgrn_deit_base_patch16_224", pretrained, **dict(model_args, **kwargs))


@register_model
def hgrn2d_deit_tiny(pretrained: bool = False, **kwargs) -> HgrnDeit:
    """HGRN-Tiny that scans rows and columns of the image."""
    model_args = dict(patch_size=14, embed_dim=192, depth=12, scan="2d")
    return _create_hgrn_deit("hgrn2d_deit_tiny", pretrained, **dict(model_args, **kwargs))


@register_model
def hgrn2d_deit_small(pretrained: bool = False, **kwargs) -> HgrnDeit:
    """HGRN-Small that scans rows and columns of the image."""
    model_args = dict(patch_size=14, embed_dim=384, depth=12, scan="2d")
    return _create_hgrn_deit("hgrn2d_deit_small", pretrained, **dict(model_args, **kwargs))


@register_model
def hgrn2d_deit_tiny_patch16_224(pretrained: bool = False, **kwargs) -> HgrnDeit:
    """HGRN-Tiny that scans rows and columns, on the 16x16 patches of DeiT."""
    model_args = dict(patch_size=16, embed_dim=192, depth=12, scan="2d")
    return _create_hgrn_deit("hgrn2d_deit_tiny_patch16_224", pretrained, **dict(model_args, **kwargs))


@register_model
def hgrn2d_deit_small_patch16_224(pretrained: bool = False, **kwargs) -> HgrnDeit:
    """HGRN-Small that scans rows and columns, on the 16x16 patches of DeiT."""
    model_args = dict(patch_size=16, embed_dim=384, depth=12, scan="2d")
    return _create_hgrn_deit("hgrn2d_deit_small_patch16_224", pretrained, **dict(model_args, **kwargs))


@register_model
def hgrn1d_vit_tiny(pretrained: bool = False, **kwargs) -> HgrnDeit:
    """HGRN-Tiny as in the authors' released image code: a SiLU output gate after the norm."""
    model_args = dict(patch_size=14, embed_dim=192, depth=12, gate_after_norm=True)
    return _create_hgrn_deit("hgrn1d_vit_tiny", pretrained, **dict(model_args, **kwargs))


@register_model
def hgrn1d_vit_small(pretrained: bool = False, **kwargs) -> HgrnDeit:
    """HGRN-Small as in the authors' released image code: a SiLU output gate after the norm."""
    model_args = dict(patch_size=14, embed_dim=384, depth=12, gate_after_norm=True)
    return _create_hgrn_deit("hgrn1d_vit_small", pretrained, **dict(model_args, **kwargs))
