"""Multiply-adds of a model before it is trained."""

from dataclasses import replace

import timm
from training import SMALL, digits

from hgrn_vision.train.build import build_model
from hgrn_vision.train.cost import multiply_adds


def test_cost_of_models_that_are_not_ours():
    """A ViT block of width D on T tokens: 12 D^2 T for its matmuls and 2 T^2 D for attention."""
    model = timm.create_model("vit_tiny_patch16_224", img_size=8, patch_size=2, embed_dim=24, depth=2, num_classes=5)
    tokens = 17
    blocks = 2 * (12 * 24 * 24 * tokens + 2 * tokens * tokens * 24)
    assert multiply_adds(model, (3, 8, 8)) == blocks + 16 * 12 * 24 + 24 * 5
    assert next(model.parameters()).device.type == "cpu"


def test_the_recurrence_is_counted_in_all_its_directions():
    config = digits()
    once, rows_and_columns = (
        multiply_adds(build_model(replace(config, model_args={**SMALL, "scan": scan}), 10), (3, 8, 8))
        for scan in ("1d", "2d")
    )
    # two more directions of 6 multiplications each, in 2 blocks of 16 channels, for 16 tokens
    assert rows_and_columns - once == 2 * 6 * 2 * 16 * 16


def test_models_without_an_output_gate_cost_less():
    with_gate, without = (
        multiply_adds(build_model(digits(model_args={**SMALL, "output_gate": gate}), 10), (3, 8, 8))
        for gate in (True, False)
    )
    # two columns less of the projection and 2 multiplications, in 2 blocks of 16 channels, for 16 tokens
    assert with_gate - without == 2 * (2 * 16 * 16 + 2 * 16) * 16
