"""hgrn-vision models: sizes and costs, counted again by hand."""

import pytest
import timm
import torch
from torch.utils.flop_counter import FlopCounterMode

from hgrn_vision.cli import main
from hgrn_vision.commands.models import describe, matmul_cost, scan_cost


def matmuls(tokens, width, patch, depth=12, classes=1000):
    """Multiply-adds of the matmuls: patches; in, out, GLU in and out of a block; head."""
    return tokens * 3 * patch**2 * width + depth * tokens * width**2 * (5 + 2 + 4 + 2) + width * classes


@pytest.mark.parametrize(
    "name, parameters, tokens, width, patch",
    [
        ("hgrn_deit_tiny", 6_107_560, 256, 192, 14),
        ("hgrn_deit_small_patch16_224", 23_784_808, 196, 384, 16),
        ("hgrn1d_vit_small", 23_715_688, 256, 384, 14),
    ],
)
def test_size_and_cost(name, parameters, tokens, width, patch):
    model = describe(name)
    assert model.parameters == parameters
    assert model.matmuls == matmuls(tokens, width, patch)
    assert model.input_size == (3, 224, 224)
    assert model.text.startswith("HGRN-")


def test_size_and_cost_of_a_pyramid():
    model = describe("hgrn_pyramid_tiny")
    assert model.parameters == 7_163_032
    # as torch counts one image through all four maps, without the head
    counted = timm.create_model("hgrn_pyramid_tiny", features_only=True)
    with FlopCounterMode(display=False) as counter, torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        counted(torch.zeros(1, 3, 224, 224))
    assert model.matmuls == counter.get_total_flops() / 2 + 192 * 1000


def test_cost_of_the_matmuls_as_torch_counts_it():
    model = timm.create_model("hgrn_deit_tiny", embed_dim=32, depth=2, patch_size=16, num_classes=7)
    # under autocast no matmul runs in place; torch's counter would overlook those
    with FlopCounterMode(display=False) as counter, torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        model(torch.zeros(1, 3, 224, 224))
    assert matmul_cost(model) == counter.get_total_flops() / 2


class Counted:
    """A number that counts the multiplications it is used in."""

    count = 0

    def __mul__(self, other):
        Counted.count += 1
        return Counted()

    def __add__(self, other):
        return Counted()

    __sub__ = __rsub__ = __radd__ = __add__
    __rmul__ = __mul__


def multiplications(directions, output_gate):
    """Multiplications of the paper's equations for one token and one channel, from activations to output."""
    Counted.count = 0
    bound, mu, c_re, c_im, g_re, g_im, cos, sin, h_re, h_im = (Counted() for _ in range(10))
    decay = bound + (1 - bound) * mu
    in_re, in_im = (1 - decay) * c_re, (1 - decay) * c_im
    total_re, total_im = Counted(), Counted()
    for _ in range(directions):
        a_re, a_im = decay * cos, decay * sin
        total_re += a_re * h_re - a_im * h_im + in_re
        total_im += a_re * h_im + a_im * h_re + in_im
    if output_gate:
        total_re, total_im = g_re * total_re, g_im * total_im
    return Counted.count


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize("output_gate", [True, False])
def test_cost_of_the_recurrence(bidirectional, output_gate):
    model = timm.create_model(
        "hgrn_deit_tiny", embed_dim=32, depth=2, patch_size=16, bidirectional=bidirectional, output_gate=output_gate
    )
    assert scan_cost(model) == multiplications(1 + bidirectional, output_gate) * 14 * 14 * 32 * 2


def test_the_list_has_every_model(capsys):
    assert main(["models"]) == 0
    lines = capsys.readouterr().out.splitlines()
    names = sorted(timm.list_models(module="hgrn") + timm.list_models(module="pyramid"))
    assert [line.split()[0] for line in lines[1 : 1 + len(names)]] == names
    tiny = next(line for line in lines if line.startswith("hgrn_deit_tiny "))
    assert "6.1M" in tiny and "1.51G" in tiny and "224x224" in tiny and "table 7" in tiny
    assert main(["models", "*_small*"]) == 0
    assert capsys.readouterr().out.count("G  224x224") == 6
    assert main(["models", "vit*"]) == 2
    assert "no model matches vit*; known models: hgrn1d_vit_small" in capsys.readouterr().err
