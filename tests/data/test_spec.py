"""The pixels that a model expects, and the settings for opening images outside a run."""

import pytest
import timm

import hgrn_vision  # noqa: F401
from hgrn_vision.data.spec import DataSettings, DataSpec, ImageSettings, resolve_spec
from hgrn_vision.train.config import TrainConfig

SMALL = {"embed_dim": 16, "depth": 1, "num_classes": 2}


def test_the_models_own_description():
    model = timm.create_model("hgrn_deit_tiny", **SMALL)
    cfg = model.pretrained_cfg
    own = DataSpec(tuple(cfg["input_size"]), tuple(cfg["mean"]), tuple(cfg["std"]), "bicubic", cfg["crop_pct"])
    assert resolve_spec(model) == own
    assert resolve_spec(model, img_size=None, crop_pct=0) == own


def test_what_is_given_takes_its_place():
    model = timm.create_model("hgrn_deit_tiny", **SMALL)
    given = {"mean": (0.1, 0.2, 0.3), "std": (0.4, 0.5, 0.6), "interpolation": "bilinear", "crop_pct": 1.0}
    assert resolve_spec(model, img_size=28, **given) == DataSpec((3, 28, 28), *given.values())


def test_a_grey_model_wants_one_channel():
    spec = resolve_spec(timm.create_model("hgrn_deit_tiny", in_chans=1, **SMALL), img_size=28)
    assert spec.input_size == (1, 28, 28) and len(spec.mean) == len(spec.std) == 1


@pytest.mark.parametrize("holdout", [-0.1, 1.5])
def test_a_share_that_is_none(holdout):
    with pytest.raises(ValueError, match=f"holdout must be between 0 and 1, got {holdout}"):
        ImageSettings("digits", holdout=holdout)


def test_a_run_has_all_the_settings_that_data_ask_for():
    settings = TrainConfig()
    assert all(hasattr(settings, name) for name in DataSettings.__annotations__)
