"""What a study is going to do, checked before anything is trained."""

import math

import pytest
from image_data import tree
from timm.models import register_model
from torch import nn
from training import SMALL

from hgrn_vision.study.definition import study_from_mapping
from hgrn_vision.study.plan import make_plan

ARMS = {"a": None, "b": {"lr": 0.5}}
CONTENT = {"arms": ARMS, "epochs": 3, "epoch_steps": 2, "batch_size": 32, "device": "cpu", "model_args": SMALL}


def test_all_arms_run_with_one_seed_before_the_next():
    plan = make_plan(study_from_mapping({**CONTENT, "seeds": [4, 1]}))
    assert [(arm.arm.name, seed) for arm, seed in plan.runs] == [("a", 4), ("b", 4), ("a", 1), ("b", 1)]
    assert [arm.steps for arm in plan.arms] == [6, 6] and plan.arms[1].config.lr == 0.5
    assert plan.images == {"training": 1438, "validation": 359, "classes": 10}


def test_training_images_are_counted_for_each_arm(tmp_path):
    for split, images in (("train", 8), ("few", 4), ("val", 2)):
        tree(tmp_path / split, a=images, b=images)
    arms = {"all": None, "few": {"train_split": "few"}, "again": {"lr": 0.5}}
    content = {**CONTENT, "data": str(tmp_path), "batch_size": 2, "micro_batch": 2, "img_size": 8}
    plan = make_plan(study_from_mapping({**content, "arms": arms}))
    assert plan.images == {"training": {"all": 16, "few": 8, "again": 16}, "validation": 4, "classes": 2}
    assert plan.training_images == "16 (all, again) or 8 (few)"
    plan = make_plan(study_from_mapping({**content, "arms": ARMS}))
    assert plan.images["training"] == 16 and plan.training_images == "16"


def test_a_plan_says_where_arms_normalize_pixels_differently():
    arms = {name: {"model": f"{name}_tiny_patch16_224", "num_heads": 1} for name in ("deit", "vit")}
    settings = {**CONTENT, "arms": arms}
    said = make_plan(study_from_mapping(settings)).unequal_pixels
    assert said.endswith("deit: mean 0.485 0.456 0.406, std 0.229 0.224 0.225; vit: mean 0.5 0.5 0.5, std 0.5 0.5 0.5.")
    assert make_plan(study_from_mapping({**settings, "mean": [0.5] * 3, "std": [0.25] * 3})).unequal_pixels == ""


def test_minutes_and_sizes_that_grow_do_not_go_together():
    content = {**CONTENT, "img_size": 8, "first_sizes": "4x1"}
    make_plan(study_from_mapping(content))
    with pytest.raises(ValueError, match="first_sizes counts epochs, whose number --minutes-per-run changes"):
        make_plan(study_from_mapping({**content, "minutes_per_run": 1}))


@register_model
def picky_model_of_a_test(pretrained=False, **kwargs):
    """Cannot be followed without numbers; takes images of 8 pixels."""

    class Picky(nn.Module):
        num_classes, pretrained_cfg = 10, {"input_size": (3, 8, 8)}

        def forward(self, x):
            if x.shape[-1] == 16:
                raise ZeroDivisionError("division by zero")
            if x.shape[-1] != 8:
                raise RuntimeError("8 pixels, please\nand no more")
            return x.new_zeros(len(x), int(x.sum().item()) + 10)

        def set_grad_checkpointing(self, enable):
            pass

    return Picky()


def test_a_model_that_cannot_be_counted_has_to_run():
    arms = {"ours": None, "picky": {"model": "picky_model_of_a_test", **dict.fromkeys(SMALL)}}
    plan = make_plan(study_from_mapping({**CONTENT, "arms": arms, "img_size": 8}))
    assert plan.arms[0].multiply_adds > 0 and math.isnan(plan.arms[1].multiply_adds)
    for side, reason in ((12, "8 pixels, please"), (16, "division by zero")):
        words = f"^arm 'picky': the model cannot take images of {side}x{side} pixels: {reason}$"
        with pytest.raises(ValueError, match=words):
            make_plan(study_from_mapping({**CONTENT, "arms": arms, "img_size": side}))
