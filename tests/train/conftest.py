"""Fixtures that several test files share."""

import pytest
from training import SMALL, Setup, digits

from hgrn_vision.train.run_folder import export_model


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    """A model folder with the classes of the digits; the model is wider than the student."""
    config = digits(model_args={**SMALL, "embed_dim": 24})
    folder = tmp_path_factory.mktemp("teacher") / "model"
    setup = Setup(config)
    setup.run(2)
    export_model(folder, setup.engine.model, config, setup.train.class_names)
    return f"local-dir:{folder}"
