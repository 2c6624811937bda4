"""`hgrn-vision models`: the models of this package with their size and cost."""

import argparse
import inspect
from typing import NamedTuple

import timm
from timm.models import model_entrypoint
from torch import nn

EXAMPLE = "hgrn-vision models 'hgrn_deit_*'"
SIDE = 224
MODULE = "hgrn"  # where timm's registry says that our models come from


class Description(NamedTuple):
    """What is known of a model before it is trained."""

    name: str
    parameters: int
    matmuls: int
    scan: int
    input_size: tuple[int, int, int]
    text: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    parser.add_argument("pattern", nargs="?", default="*", help="names to list, such as '*_small*' (default: all)")


def run(args: argparse.Namespace) -> int:
    """Print one line per model."""
    names = timm.list_models(args.pattern, module=MODULE)
    if not names:
        known = ", ".join(timm.list_models(module=MODULE))
        raise ValueError(f"no model is named {args.pattern}; there are {known}")
    width = max(map(len, names))
    print(f"{'name':<{width}}  parameters  multiply-adds  input    description")
    for model in map(describe, names):
        size = "x".join(map(str, model.input_size[1:]))
        cost = (model.matmuls + model.scan) / 1e9
        print(f"{model.name:<{width}}  {model.parameters / 1e6:>9.1f}M  {cost:>12.2f}G  {size}  {model.text}")
    print(
        f"\nmultiply-adds of one image of {SIDE}x{SIDE}, recurrence included, norms and activation functions not; "
        "other sizes work too"
    )
    return 0


def describe(name: str) -> Description:
    """Size and cost of a model for 1000 classes, without allocating it."""
    model = timm.create_model(name, device="meta")
    return Description(
        name,
        sum(parameter.numel() for parameter in model.parameters()),
        matmul_cost(model),
        scan_cost(model),
        model.default_cfg["input_size"],
        inspect.getdoc(model_entrypoint(name)).splitlines()[0],
    )


def matmul_cost(model: nn.Module) -> int:
    """Multiply-adds of the matmuls and the patch convolution for one image."""
    layers = [module for module in model.modules() if isinstance(module, nn.Linear | nn.Conv2d)]
    # each weight is used once per patch, those of the head once per image
    once = model.get_classifier()
    return sum(module.weight.numel() * (1 if module is once else _tokens(model)) for module in layers)


def scan_cost(model: nn.Module) -> int:
    """Multiply-adds of the gated recurrence for one image."""
    cost = 0
    for block in model.blocks:
        mixer = block.mixer
        # per token and channel: the decay 1, its complement times c 2, the output gate 2;
        # in each direction the rotation times the decay 2, and times the state 4
        each = 3 + 2 * mixer.output_gate + 6 * (1 + mixer.bidirectional)
        cost += each * _tokens(model) * mixer.dim
    return cost


def _tokens(model: nn.Module) -> int:
    height, width = model.patch_embed.dynamic_feat_size((SIDE, SIDE))
    return height * width
