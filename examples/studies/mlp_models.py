"""MLP-Mixer and ResMLP at the width and depth of a small study: timm's own take neither, nor another patch size.

A study names this file under `modules`; timm's classes compute the models.
"""

from functools import partial

from timm.models import build_model_with_cfg, generate_default_cfgs, register_model
from timm.models.mlp_mixer import Affine, MlpMixer, ResBlock
from torch import nn

default_cfgs = generate_default_cfgs(
    {
        name: {"num_classes": 1000, "input_size": (3, 32, 32), "first_conv": "stem.proj", "classifier": "head"}
        for name in ("mixer_mini", "resmlp_mini")
    }
)


def _create(name: str, pretrained: bool, **kwargs) -> nn.Module:
    return build_model_with_cfg(MlpMixer, name, pretrained, **kwargs)


@register_model
def mixer_mini(pretrained: bool = False, **kwargs) -> nn.Module:
    """MLP-Mixer (arXiv 2105.01601): 9 blocks of width 64, as many parameters as 6 of HGRN's."""
    return _create("mixer_mini", pretrained, **dict(dict(patch_size=4, num_blocks=9, embed_dim=64), **kwargs))


@register_model
def resmlp_mini(pretrained: bool = False, **kwargs) -> nn.Module:
    """ResMLP (arXiv 2105.03404): 9 blocks of width 64, as many parameters as 6 of HGRN's."""
    block = partial(ResBlock, init_values=0.1)  # timm's for its smaller models
    model_args = dict(patch_size=4, num_blocks=9, embed_dim=64, mlp_ratio=4.0, block_layer=block, norm_layer=Affine)
    return _create("resmlp_mini", pretrained, **dict(model_args, **kwargs))
