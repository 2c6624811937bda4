"""Studies: what an arm is, what arms share, what is refused."""

import sys
from dataclasses import replace

import pytest

from hgrn_vision.study.definition import Arm, import_modules, parse_arm, read_study, study_from_mapping
from hgrn_vision.train.recipes import resolve


@pytest.mark.parametrize(
    "text, name, settings",
    [
        ("hgrn_deit_tiny", "hgrn_deit_tiny", {"model": "hgrn_deit_tiny"}),
        (
            "no bound=hgrn_deit_tiny,lower_bound=none",
            "no bound",
            {"model": "hgrn_deit_tiny", "model_args": {"lower_bound": "none"}},
        ),
        # settings of train and arguments of the constructor are told apart by name
        (
            "deep=hgrn_deit_tiny,depth=4,lr=1e-3,eps=1e-6,betas=[0.8,0.9],freeze=2,img_size=none",
            "deep",
            {
                "model": "hgrn_deit_tiny",
                "lr": 1e-3,
                "betas": (0.8, 0.9),
                "freeze": "2",
                "img_size": None,
                "model_args": {"depth": 4, "eps": 1e-6},
            },
        ),
        ("fast=lr=0.01,epochs=3", "fast", {"lr": 0.01, "epochs": 3}),
        ("lr=0.01", "lr=0.01", {"lr": 0.01}),
        ("narrow=embed_dim=96,lr=0.01", "narrow", {"lr": 0.01, "model_args": {"embed_dim": 96}}),
        # a model's name makes what comes before it a name, even that of a setting
        ("teacher=resnet18", "teacher", {"model": "resnet18"}),
    ],
)
def test_an_arm_as_typed(text, name, settings):
    assert parse_arm(text) == Arm(name, settings)


def test_what_an_arm_does_not_name_is_equal():
    study = study_from_mapping(
        {
            "lr": 0.5,
            "model_args": {"patch_size": 2, "depth": 3},
            "arms": {"a": None, "b": {"model": "resnet18", "patch_size": None, "depth": None, "epochs": 7}},
        }
    )
    a, b = study.configs().values()
    assert (a.model, a.model_args, b.model, b.model_args) == (
        "hgrn_deit_tiny",
        {"patch_size": 2, "depth": 3},
        "resnet18",
        {},
    )
    assert (
        replace(b, model=a.model, model_args=a.model_args, epochs=a.epochs)
        == a
        == replace(resolve({"lr": 0.5}), model_args={"patch_size": 2, "depth": 3})
    )


@pytest.mark.parametrize(
    "content, words",
    [
        ({"seeds": []}, "at least one seed"),
        ({"seeds": 3}, "seeds must be a list of whole numbers, got 3"),
        ({"sizes": [0]}, "at least 1 pixel"),
        ({"seed": 3}, "give --seeds instead"),
        ({"minutes_per_run": "long"}, "must be a number"),
        ({"arms": "hgrn_deit_tiny"}, "arms must be a list"),
        ({"arms": 5}, "arms must be a list or a mapping of names to settings, got 5"),
        ({"arms": {"a": 3, "b": None}}, "arm 'a' must be a model name or a mapping of settings, got 3"),
        ({"learning_rate": 3}, "unknown setting 'learning_rate'; hgrn-vision train --print-config lists them all"),
        ({"photos": ["x"]}, "needs labels"),
        ({"arms": {"a": None}}, "at least two arms, got 1"),
        ({"arms": ["a=lr=0.1", "a=lr=0.2"]}, "two arms are named 'a'"),
        ({"arms": {"a b": None, "a:b": None}}, "two arms would share the folder 'a_b'"),
        ({"arms": {"a": {"threads": 1}, "b": None}}, "arm 'a' cannot have its own threads"),
        ({"seeds": [1, 2, 1]}, "two seeds are 1"),
        ({"minutes_per_run": -1}, "must not be negative, got -1"),
        ({"minutes_per_run": float("inf")}, "minutes_per_run must be at most 1,000,000, got inf"),
        ({"minutes_per_run": float("nan")}, "minutes_per_run must be at most 1,000,000, got nan"),
        ({"minutes_per_run": 1e308}, "minutes_per_run must be at most 1,000,000, got 1e.308"),
    ],
)
def test_studies_that_are_refused(content, words):
    with pytest.raises(ValueError, match=words):
        study_from_mapping({"arms": {"a": None, "b": None}, **content})


@pytest.mark.parametrize(
    "text, message",
    [
        (
            "lower_bound=none",
            "arm 'lower_bound': timm has no model 'none'; an argument of the shared model needs a name before it: "
            "NAME=lower_bound=none",
        ),
        ("tiny=hgrn_deit_tinny", "arm 'tiny': timm has no model 'hgrn_deit_tinny'"),
        ("nowhere", "arm 'nowhere': timm has no model 'nowhere'"),
    ],
)
def test_an_argument_without_a_name_is_told_from_a_model(text, message):
    study = study_from_mapping({"arms": ["hgrn_deit_tiny", text]})
    with pytest.raises(ValueError) as error:
        study.configs()
    assert str(error.value) == message


def test_pixel_sequences_need_a_size():
    content = {"arms": {"a": None, "b": None}, "data": "photos", "sequence": True}
    with pytest.raises(ValueError, match="needs --img-size"):
        study_from_mapping(content).configs()
    config = study_from_mapping({**content, "img_size": 32}).configs()["a"]
    assert config.model_args == {"patch_size": 1, "in_chans": 1}


def test_models_of_ones_own(tmp_path):
    (tmp_path / "own_models_of_a_test.py").write_text(
        "from timm.models import register_model\nfrom timm.models.resnet import resnet18\n\n"
        "@register_model\ndef my_resnet(pretrained=False, **kwargs):\n    return resnet18(**kwargs)\n"
    )
    file = tmp_path / "study.yaml"
    file.write_text("modules: [own_models_of_a_test.py]\narms: {a: my_resnet, b: resnet18}\n")
    study = study_from_mapping(read_study(file))
    with pytest.raises(ValueError, match="timm has no model 'my_resnet'"):
        study.configs()
    import_modules(study.modules)
    assert study.configs()["a"].model == "my_resnet"


def test_files_of_the_same_name_are_told_apart(tmp_path, monkeypatch):
    one, two, token = (tmp_path / name for name in ("one/twins_of_a_test.py", "two/twins_of_a_test.py", "one/token.py"))
    for path in (one, two, token):
        path.parent.mkdir(exist_ok=True)
        path.touch()
    import_modules([str(one)])
    loaded = sys.modules["twins_of_a_test"]
    monkeypatch.chdir(tmp_path)
    import_modules(["one/twins_of_a_test.py", "token", "math"])
    assert sys.modules["twins_of_a_test"] is loaded
    for path, owner in ((two, one), (token, ".*/token.py"), ("sys.py", "a part of Python")):
        with pytest.raises(
            ValueError, match=f"^cannot import {path}: the name '.*' is taken by {owner}; rename the file"
        ):
            import_modules([str(path)])


@pytest.mark.parametrize(
    "text, words",
    [
        ("def (", "invalid syntax"),
        ("nn.Linear", "name 'nn' is not defined"),
        ("{}['missing']", "KeyError: 'missing'"),
        ("1 / 0", "division by zero"),
        ("raise RuntimeError", "RuntimeError"),
    ],
)
def test_modules_that_cannot_be_imported(tmp_path, text, words):
    (tmp_path / "broken_models_of_a_test.py").write_text(text)
    # a file that was mended is read again
    for _ in range(2):
        with pytest.raises(ValueError, match=f"cannot import .*broken_models_of_a_test.py: .*{words}"):
            import_modules([str(tmp_path / "broken_models_of_a_test.py")])
