"""Loading models for the commands, from everywhere they may be stored."""

import shutil

import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from saved_models import CLASSES, SMALL, edit_config, package_starter, save_model, small_model, write_image

from hgrn_vision.inference.pretrained import load_model, read_initial
from hgrn_vision.train import checkpoint
from hgrn_vision.train.build import load_body
from hgrn_vision.train.config import TrainConfig, to_mapping


def same_weights(first, second):
    first, second = first.state_dict(), second.state_dict()
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("where", ["", "model", "local-dir:", "model/model.safetensors", "weights.pth"])
def test_from_a_run_a_folder_and_a_file(where, tmp_path):
    model = save_model(tmp_path / "model")
    if where == "weights.pth":
        torch.save({"model": model.state_dict()}, tmp_path / "model" / "other.pth")
        (tmp_path / "model" / "model.safetensors").unlink()
        where = "model/other.pth"
    path = f"local-dir:{tmp_path}/model" if where == "local-dir:" else str(tmp_path / where)
    loaded = load_model(path)
    assert same_weights(loaded.model, model) and not loaded.model.training
    assert loaded.class_names == CLASSES
    assert loaded.spec.input_size == (3, 16, 16)


def write_checkpoint(path, ema):
    config = TrainConfig(
        img_size=16, model_args={key: SMALL[key] for key in SMALL if key != "img_size"}, mean=(0, 0, 0)
    )
    model, average = small_model(seed=1), small_model(seed=2)
    weights = {"model": model.state_dict(), "ema": average.state_dict() if ema else None}
    checkpoint.write(path, checkpoint.Checkpoint(**weights, config=to_mapping(config), class_names=CLASSES))
    return average if ema else model


@pytest.mark.parametrize("ema", [False, True])
def test_from_a_checkpoint_of_a_run(ema, tmp_path):
    path = tmp_path / "run" / "checkpoints" / "last.safetensors"
    model = write_checkpoint(path, ema)
    loaded = load_model(str(path))
    assert same_weights(loaded.model, model)
    assert loaded.class_names == CLASSES
    assert loaded.spec.input_size == (3, 16, 16) and loaded.spec.mean == (0, 0, 0)
    with pytest.raises(ValueError, match="has not finished an epoch"):
        load_model(str(tmp_path / "run"))


@pytest.mark.parametrize("name", ["hgrn_deit_tiny", "hgrn_deit_tiny.dist_photos"])
def test_by_the_name_of_a_model_whose_weights_come_with_the_package(name, tmp_path, monkeypatch):
    package_starter(tmp_path / "pretrained", monkeypatch)
    monkeypatch.chdir(tmp_path)
    loaded = load_model(name)
    assert same_weights(loaded.model, timm.create_model("hgrn_deit_tiny", pretrained=True))
    size = timm.get_pretrained_cfg("hgrn_deit_tiny").input_size
    assert loaded.spec.input_size == size and not loaded.model.training
    names = loaded.class_names
    assert len(names) == len(set(names)) == 1000 and names[207] == "golden retriever"
    assert [names[i] for i in (134, 517)] == ["crane (n02012849)", "crane (n03126707)"]
    assert names[638] != names[639] and "maillot" in names[638] and "maillot" in names[639]
    assert loaded.aliases[134][0] == "n02012849"
    # a folder of that name takes precedence
    save_model(tmp_path / name)
    loaded = load_model(name)
    assert loaded.class_names == CLASSES and loaded.aliases == []


@pytest.mark.parametrize("name", ["hgrn_deit_small", "hgrn_deit_tiny.untrained", "resnet50"])
def test_a_registered_name_without_weights(name):
    with pytest.raises(ValueError, match=f"the package has no weights for {name}, only for hgrn_deit_tiny$"):
        load_model(name)


def test_images_are_prepared_as_timm_does_it(tmp_path):
    save_model(tmp_path)
    loaded = load_model(str(tmp_path))
    image = Image.open(write_image(tmp_path / "a.png", 0, (40, 27)))
    config = timm.data.resolve_data_config({"img_size": 16}, model=loaded.model)
    want = timm.data.create_transform(**config)(image)
    torch.testing.assert_close(loaded.prepare(image), want)
    assert load_model(str(tmp_path), img_size=32).prepare(image).shape == (3, 32, 32)


def test_export_modes_reach_the_layers(tmp_path):
    save_model(tmp_path)
    assert load_model(str(tmp_path)).model.blocks[0].mixer.backend is None
    for mode in ("scriptable", "exportable"):
        assert load_model(str(tmp_path), **{mode: True}).model.blocks[0].mixer.backend == "torch"


def test_names_of_classes(tmp_path):
    save_model(tmp_path)
    edit_config(tmp_path, label_names=None)
    assert load_model(str(tmp_path)).class_names == ["0", "1", "2"]
    edit_config(tmp_path, label_names={"2": "c", "0": "a", "1": "b"})
    assert load_model(str(tmp_path)).class_names == ["a", "b", "c"]


BROKEN = {
    "no config.json": lambda folder: (folder / "config.json").unlink(),
    "model.safetensors is missing": lambda folder: (folder / "model.safetensors").unlink(),
    "does not describe a model": lambda folder: (folder / "config.json").write_text("{"),
    "'resnet_of_mars', which timm does not know": lambda folder: edit_config(folder, architecture="resnet_of_mars"),
    "2 label names for a head of 3": lambda folder: edit_config(folder, label_names=["a", "b"]),
    "both named 'b'": lambda folder: edit_config(folder, label_names=["a", "b", "b"]),
    # timm writes the number of classes twice since 1.0.31
    "size mismatch for head.weight": lambda folder: edit_config(
        folder, num_classes=5, label_names=list("abcde"), model_args={**SMALL, "num_classes": 5}
    ),
    "unexpected keyword argument 'wings'": lambda folder: edit_config(folder, model_args={"wings": 2}),
    "header": lambda folder: (folder / "model.safetensors").write_bytes(b"nonsense" * 100),
    "head.bias holds values that are NaN": lambda folder: spoil(folder / "model.safetensors"),
}


def spoil(path):
    tensors = load_file(path)
    tensors["head.bias"][1] = float("nan")
    save_file(tensors, path)


@pytest.mark.parametrize("message", BROKEN)
def test_a_broken_folder_is_refused_in_one_line(message, tmp_path):
    save_model(tmp_path)
    BROKEN[message](tmp_path)
    with pytest.raises(ValueError, match=message) as error:
        load_model(str(tmp_path))
    assert "\n" not in str(error.value)
    assert str(tmp_path) in str(error.value)


def test_nothing_there(tmp_path):
    with pytest.raises(ValueError, match="no model at .* hf-hub:NAME or hgrn_deit_tiny$"):
        load_model(str(tmp_path / "nothing"))
    with pytest.raises(ValueError, match="device 'moon'"):
        load_model(str(tmp_path), device="moon")


def test_weights_that_do_not_fit_their_folder(tmp_path):
    save_model(tmp_path)
    save_file({"head.bias": torch.zeros(3)}, tmp_path / "part.safetensors")
    with pytest.raises(ValueError, match="part.safetensors does not fit the model"):
        load_model(str(tmp_path / "part.safetensors"))


def test_a_released_checkpoint_determines_its_model(tmp_path):
    from tests.model.test_weights import released_state_dict

    state = released_state_dict(depth=12, d=192, classes=5)
    torch.save({"model": state}, tmp_path / "released.pth")
    initial = read_initial(str(tmp_path / "released.pth"))
    assert initial.settings == {"model": "hgrn1d_vit_tiny"}
    thetas = torch.stack([state[f"layers.3.token_mixer.theta_{way}"].flatten() for way in ("forward", "reverse")])
    assert torch.equal(initial.weights["blocks.3.mixer.theta"], thetas)
    model = timm.create_model("hgrn1d_vit_tiny")
    load_body(model, initial.weights, seed=0)
    assert torch.equal(model.lower_bound, torch.roll(state["lower_bounds"], 1, 0))


def test_a_bare_weights_file_needs_the_name_of_its_model(tmp_path):
    model = save_model(tmp_path / "plain")
    shutil.move(tmp_path / "plain" / "model.safetensors", tmp_path / "bare.safetensors")
    with pytest.raises(
        ValueError, match="bare.safetensors does not say which model it belongs to: name it with --model"
    ):
        read_initial(str(tmp_path / "bare.safetensors"))
    with pytest.raises(ValueError, match="does not fit the model"):
        read_initial(str(tmp_path / "bare.safetensors"), "hgrn_deit_tiny")
    assert model.num_classes == 3
