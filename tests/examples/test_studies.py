"""The studies under examples/ are complete: each parses, and each of its models can be built at its image size."""

from dataclasses import replace
from pathlib import Path

import pytest

from hgrn_vision.study.definition import import_modules, read_study, study_from_mapping
from hgrn_vision.train.build import build_model
from hgrn_vision.train.config import TrainConfig

STUDIES = sorted((Path(__file__).resolve().parents[2] / "examples" / "studies").glob("*.yaml"))


@pytest.mark.parametrize("path", STUDIES, ids=lambda path: path.stem)
def test_every_example_study_can_be_planned(path):
    content = read_study(path)
    assert content.pop("output") == f"studies/{path.stem}"
    assert f"hgrn-vision compare examples/studies/{path.name}" in path.read_text()
    study = study_from_mapping(content)
    assert study.seeds == (0, 1, 2)
    import_modules(study.modules)
    configs = study.configs()
    parameters = {name: count(replace(config, seed=1)) for name, config in configs.items()}
    # arms differ in what they compute, hardly in how much they can learn
    first = next(iter(parameters.values()))
    assert all(0.8 * first < number < 1.2 * first for number in parameters.values()), parameters
    steps = {(config.epochs, config.batch_size, config.img_size) for config in configs.values()}
    assert len(steps) == 1


def count(config: TrainConfig) -> int:
    return sum(parameter.numel() for parameter in build_model(config, 10).parameters())
