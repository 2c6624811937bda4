"""hgrn-vision publish: a folder that timm and the Hub understand, complete or not written at all."""

import json

import pytest
import timm
import torch
import yaml
from PIL import Image
from saved_models import CLASSES, SMALL, save_model, small_model, write_image
from timm.models import save_for_hf

from hgrn_vision.cli import main
from hgrn_vision.inference.pretrained import load_model
from hgrn_vision.train.config import TrainConfig
from hgrn_vision.train.run_folder import export_model


@pytest.fixture
def run(tmp_path):
    """A run folder, and the model in it."""
    model = save_model(tmp_path / "run" / "model")
    return str(tmp_path / "run"), model


def front_matter(folder):
    _, front, text = (folder / "README.md").read_text(encoding="utf-8").split("---\n", 2)
    return yaml.safe_load(front), text


def test_timm_reads_it_back(run, tmp_path, capsys):
    where, model = run
    folder = tmp_path / "new" / "flowers"
    assert main(["publish", where, str(folder), "--license", "cc-by-4.0"]) == 0
    assert sorted(path.name for path in folder.iterdir()) == ["README.md", "config.json", "model.safetensors"]
    assert [path.name for path in folder.parent.iterdir()] == ["flowers"]
    assert f"timm.create_model('local-dir:{folder}', pretrained=True)" in capsys.readouterr().out
    again = timm.create_model(f"local-dir:{folder}", pretrained=True)
    assert all(torch.equal(tensor, again.state_dict()[name]) for name, tensor in model.state_dict().items())
    assert again.pretrained_cfg["label_names"] == CLASSES and again.num_classes == 3
    assert again.pretrained_cfg["license"] == "cc-by-4.0"
    loaded, first = load_model(str(folder)), load_model(where)
    assert loaded.spec == first.spec and loaded.class_names == first.class_names
    assert list(timm.data.resolve_data_config(model=again)["input_size"]) == [3, 16, 16]


def test_the_folder_may_be_the_one_where_the_command_is_given(run, tmp_path, monkeypatch):
    (tmp_path / "flowers").mkdir()
    monkeypatch.chdir(tmp_path / "flowers")
    assert main(["publish", run[0], "."]) == 0
    assert "# Model card for flowers\n" in front_matter(tmp_path / "flowers")[1]


def test_the_card(run, tmp_path):
    assert main(["publish", run[0], str(tmp_path / "flowers")]) == 0
    front, text = front_matter(tmp_path / "flowers")
    assert front["library_name"] == "timm" and front["license"] == "unknown" and "datasets" not in front
    assert front["tags"] == ["image-classification", "timm"]
    assert all(f"\n    {name}\n" in text for name in CLASSES)
    code = text.split("```python\n")[1].split("```")[0]
    assert code.startswith("import hgrn_vision") and "hf-hub:USER/flowers" in code
    assert "gated linear recurrence" in text


def test_the_card_of_another_architecture_does_not_name_this_package(tmp_path):
    config = {"label_names": CLASSES}
    save_for_hf(timm.create_model("test_vit", num_classes=3), tmp_path / "run" / "model", model_config=config)
    assert main(["publish", str(tmp_path / "run"), str(tmp_path / "vit")]) == 0
    text = front_matter(tmp_path / "vit")[1]
    assert "The architecture is one of timm's." in text
    assert "gated linear recurrence" not in text and "import hgrn_vision" not in text


def test_the_cards_example_runs(run, tmp_path, monkeypatch):
    assert main(["publish", run[0], str(tmp_path / "flowers")]) == 0
    code = front_matter(tmp_path / "flowers")[1].split("```python\n")[1].split("```")[0]
    monkeypatch.chdir(tmp_path)
    Image.open(write_image(tmp_path / "a.png", 3, (40, 30))).save("photo.jpg")
    names = {}
    exec(code.replace("hf-hub:USER/flowers", "local-dir:flowers"), names)
    with torch.no_grad():
        image = load_model(run[0]).prepare(Image.open("photo.jpg"))
        assert names["name"] == CLASSES[small_model()(image[None]).argmax()]


def test_the_model_of_a_run_with_its_own_settings(tmp_path):
    model = small_model()
    model.pretrained_cfg = {**model.pretrained_cfg, "input_size": (3, 16, 16), "mean": (0.1, 0.2, 0.3)}
    args = {key: value for key, value in SMALL.items() if key != "img_size"}
    export_model(tmp_path / "run" / "model", model, TrainConfig(model_args=args, img_size=16), CLASSES)
    assert main(["publish", str(tmp_path / "run"), str(tmp_path / "out")]) == 0
    loaded = load_model(str(tmp_path / "out"))
    assert loaded.spec.mean == (0.1, 0.2, 0.3) and loaded.model.patch_embed.img_size == (16, 16)
    described = json.loads((tmp_path / "out" / "config.json").read_text())
    # timm 1.0.31 adds those of every model, and writes the size as two sides
    assert described["model_args"].items() >= args.items()
    assert not {"tag", "label_names"} & set(described["pretrained_cfg"])


def test_what_is_refused(run, tmp_path, capsys):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("precious")
    (tmp_path / "file").write_text("precious")
    (tmp_path / "empty").mkdir()
    for model, folder, message in (
        (run[0], "full", "is not empty"),
        (run[0], "file", "is a file"),
        (str(tmp_path / "nowhere"), "new", "no model at"),
        ("hgrn_deit_small", "new", "only for hgrn_deit_tiny"),
    ):
        assert main(["publish", model, str(tmp_path / folder)]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert message in line
    assert [path.name for path in (tmp_path / "full").iterdir()] == ["notes.txt"]
    assert main(["publish", run[0], str(tmp_path / "empty")]) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "file", "full", "run"]


@pytest.mark.parametrize("step", ["write_model", "write_text"])
def test_nothing_is_left_half_written(step, run, tmp_path, monkeypatch):
    def full_disk(folder, *args):
        folder.mkdir(exist_ok=True) if step == "write_model" else None
        raise OSError("no space left on device")

    monkeypatch.setattr(f"hgrn_vision.commands.publish.{step}", full_disk)
    assert main(["publish", run[0], str(tmp_path / "out" / "flowers")]) == 2
    assert list((tmp_path / "out").iterdir()) == []
