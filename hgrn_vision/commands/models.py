"""`hgrn-vision models`: list the models of this package with their size and cost."""

import argparse
import inspect
import math
from typing import NamedTuple

import timm
from timm.models import model_entrypoint
from torch import nn

from ..train.cost import recurrence_cost

EXAMPLE = "hgrn-vision models 'hgrn_deit_*'"
SIDE = 224
MODULES = ("hgrn", "pyramid")  # the modules of our models in timm's registry


class Description(NamedTuple):
    """Size and cost of a model."""

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
    names = list_names(args.pattern)
    if not names:
        known = ", ".join(list_names())
        raise ValueError(f"no model matches {args.pattern}; known models: {known}")
    width = max(map(len, names))
    print(f"{'name':<{width}}  parameters  multiply-adds  input    description")
    for model in map(describe, names):
        size = "x".join(map(str, model.input_size[1:]))
        cost = (model.matmuls + model.scan) / 1e9
        print(f"{model.name:<{width}}  {model.parameters / 1e6:>9.1f}M  {cost:>12.2f}G  {size}  {model.text}")
    print(
        f"\nmultiply-adds for one {SIDE}x{SIDE} image, with the recurrence and pyramid maps, without norms and "
        "activation functions; other image sizes work too"
    )
    return 0


def list_names(pattern: str = "*") -> list[str]:
    """Names of the models of this package that match a pattern."""
    return [name for module in MODULES for name in timm.list_models(pattern, module=module)]


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
    """Multiply-adds of the matmuls and convolutions for one image, including all maps of a pyramid."""
    pyramid = getattr(model, "pyramid", {})
    in_pyramid = {module for level in pyramid.values() for module in level.modules()}
    layers = [module for module in model.modules() if isinstance(module, nn.Linear | nn.Conv2d)]
    # each weight is used once per patch, those of the head once per image
    once = model.get_classifier()
    cost = sum(m.weight.numel() * (1 if m is once else _tokens(model)) for m in layers if m not in in_pyramid)
    return cost + sum(_map_cost(model, level, model.feature_info[int(i)]["reduction"]) for i, level in pyramid.items())


def _map_cost(model: nn.Module, level: nn.Module, reduction: int) -> int:
    cost, positions = 0, _tokens(model)
    for module in level.modules():
        if isinstance(module, nn.ConvTranspose2d):
            # each weight is used once per position of the input
            cost += module.weight.numel() * positions
            positions *= math.prod(module.stride)
        elif isinstance(module, nn.Conv2d):
            cost += module.weight.numel() * math.ceil(SIDE / reduction) ** 2
    return cost


def scan_cost(model: nn.Module) -> int:
    """Multiply-adds of the gated recurrence for one image."""
    return recurrence_cost(model, _tokens(model))


def _tokens(model: nn.Module) -> int:
    height, width = model.patch_embed.dynamic_feat_size((SIDE, SIDE))
    return height * width
