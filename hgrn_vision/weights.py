"""Loading weights from other layouts: the authors' released checkpoints, other patch sizes, other heads."""

import os
import re
from collections.abc import Mapping
from typing import Any

import torch
from timm.layers import resample_patch_embed
from timm.models import adapt_input_conv, clean_state_dict, load_state_dict
from torch import nn

# our names for the tensors of a released checkpoint; _convert_released handles those that need more than a new name
_RELEASED_NAMES = (
    (r"^layers\.(\d+)\.token_norm\.", r"blocks.\1.norm1."),
    (r"^layers\.(\d+)\.feature_norm\.", r"blocks.\1.norm2."),
    (r"^layers\.(\d+)\.token_mixer\.(norm|out_proj)\.", r"blocks.\1.mixer.\2."),
    (r"^layers\.(\d+)\.feature_mixer\.l3\.", r"blocks.\1.mlp.fc2."),
    (r"^head\.1\.", r"head."),
)
_WRAPPERS = ("state_dict_ema", "model_ema", "state_dict", "model")


def checkpoint_filter_fn(state_dict: dict[str, Any], model: nn.Module) -> dict[str, torch.Tensor]:
    """Convert a checkpoint from any known layout to our tensor names and the model's patch size."""
    for wrapper in _WRAPPERS:
        if isinstance(state_dict.get(wrapper), dict):
            state_dict = state_dict[wrapper]
            break
    state_dict = clean_state_dict(state_dict)
    if "lower_bounds" in state_dict:
        state_dict = _convert_released(state_dict)
    weight = state_dict.get("patch_embed.proj.weight")
    if weight is not None and weight.dim() == 4:
        patch_size = model.patch_embed.patch_size
        state_dict["patch_embed.proj.weight"] = resample_patch_embed(weight, list(patch_size))
        if weight.shape[1] == model.in_chans and model.in_chans > 3:
            # timm only adapts 3-channel weights and would drop a projection that already fits
            model.pretrained_cfg["first_conv"] = None
    for name, tensor in model.state_dict().items():
        # weights from a model without local convolutions get convolutions that start as the identity
        if name.endswith("mixer.local_conv.weight") and name not in state_dict:
            state_dict[name] = nn.init.dirac_(torch.empty_like(tensor), groups=tensor.shape[0])
    return state_dict


def _convert_released(released: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Convert the layout of the authors' image models to ours, without changing any value."""
    released = dict(released)
    out = {}
    try:
        # their bound of a layer sums P over the layers before it, ours over rows 1 to its own: rows are off by one
        out["lower_bound"] = torch.roll(released.pop("lower_bounds"), 1, 0)
        weight = released.pop("to_patch_embedding.1.weight")  # (D, p * p * 3)
        patch = round((weight.shape[1] / 3) ** 0.5)
        out["patch_embed.proj.weight"] = weight.view(-1, patch, patch, 3).permute(0, 3, 1, 2).contiguous()
        out["patch_embed.proj.bias"] = released.pop("to_patch_embedding.1.bias")
        for i in range(out["lower_bound"].shape[0]):
            mixer, mlp = f"layers.{i}.token_mixer.", f"layers.{i}.feature_mixer."
            theta = [released.pop(f"{mixer}theta_{direction}").flatten() for direction in ("forward", "reverse")]
            out[f"blocks.{i}.mixer.theta"] = torch.stack(theta)
            for kind in ("weight", "bias"):
                c = released.pop(f"{mixer}input_proj.{kind}")  # rows Re, Im of channel 0, Re, Im of channel 1, ...
                f, g = released.pop(f"{mixer}lambda_proj.{kind}"), released.pop(f"{mixer}gate.{kind}")
                out[f"blocks.{i}.mixer.in_proj.{kind}"] = torch.cat([c[0::2], c[1::2], f, g])
                branches = [released.pop(f"{mlp}l{n}.{kind}") for n in (1, 2)]
                out[f"blocks.{i}.mlp.fc1.{kind}"] = torch.cat(branches)
    except KeyError as error:
        raise ValueError(f"released HGRN checkpoint lacks {error.args[0]!r}") from None
    for name, tensor in released.items():
        for pattern, replacement in _RELEASED_NAMES:
            name = re.sub(pattern, replacement, name)
        out[name] = tensor
    return out


def load_checkpoint(model: nn.Module, path: str | os.PathLike, drop_head: bool = False) -> list[str]:
    """Load a checkpoint into a model: one of ours or of the authors', as .safetensors or in PyTorch's format.

    The patch projection is resampled to the model's patch size and channels. If anything does not fit, nothing is
    loaded.

    Args:
        model: an HGRN model from timm.create_model.
        path: the checkpoint file.
        drop_head: skip the checkpoint's head if it does not fit the model's, or if the model has none.

    Returns:
        The names of the model's tensors that were not loaded: those of a dropped head, and those of a pyramid if the
        weights come from a plain model.
    """
    path = os.fspath(path)
    state_dict = checkpoint_filter_fn(_read(path), model)
    own = model.state_dict()
    conv = "patch_embed.proj.weight"
    if conv in own and conv in state_dict and own[conv].shape[1] != state_dict[conv].shape[1]:
        state_dict[conv] = adapt_input_conv(own[conv].shape[1], state_dict[conv])
    new = missing_pyramid(state_dict, own)
    dropped = []
    if drop_head:
        head = [name for name in own if name.startswith("head.")]
        dropped = [name for name in head if name not in state_dict or state_dict[name].shape != own[name].shape]
        # a model without a head cannot use one either
        if dropped or not head:
            dropped = head
            state_dict = {name: tensor for name, tensor in state_dict.items() if not name.startswith("head.")}
    dropped = [*dropped, *new]
    _check_fit(path, state_dict, {name: tensor for name, tensor in own.items() if name not in dropped})
    model.load_state_dict(state_dict, strict=False)
    return dropped


def missing_pyramid(state_dict: Mapping[str, Any], own: Mapping[str, Any], prefix: str = "") -> list[str]:
    """The names of a model's pyramid tensors if the weights under `prefix` have no pyramid, else none."""
    pyramid = f"{prefix}pyramid."
    if f"{prefix}patch_embed.proj.weight" not in state_dict or any(name.startswith(pyramid) for name in state_dict):
        return []
    return [name for name in own if name.startswith("pyramid.")]


def _read(path: str) -> dict[str, Any]:
    if not os.path.isfile(path):
        raise FileNotFoundError(f"no checkpoint file at {path}")
    try:
        state_dict = load_state_dict(path)
    except Exception as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ValueError(f"{path} is not a checkpoint that can be read safely: {reason}") from error
    tensors = {name: value for name, value in state_dict.items() if isinstance(value, torch.Tensor)}
    if not tensors:
        raise ValueError(f"{path} holds no tensors")
    return tensors


def _check_fit(path: str, state_dict: dict[str, torch.Tensor], own: dict[str, torch.Tensor]) -> None:
    wrong = [f"{name} is missing" for name in own if name not in state_dict]
    wrong += [f"{name} is not in the model" for name in state_dict if name not in own]
    wrong = [
        f"{name} is {tuple(state_dict[name].shape)}, the model's {tuple(tensor.shape)}"
        for name, tensor in own.items()
        if name in state_dict and state_dict[name].shape != tensor.shape
    ] + wrong
    if wrong:
        more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        hint = "; drop_head=True leaves out the head" if all(w.startswith("head.") for w in wrong) else ""
        raise ValueError(f"{path} does not fit the model: {'; '.join(wrong[:3])}{more}{hint}")
    for name, tensor in state_dict.items():
        if tensor.is_floating_point() and not torch.isfinite(tensor).all():
            raise ValueError(f"{path}: {name} holds values that are NaN or infinite")
