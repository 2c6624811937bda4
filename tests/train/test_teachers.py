"""Teachers of every kind give the answers of their model, at their own size and normalisation."""

import json
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import timm
import torch
from saved_models import CLASSES, save_model
from timm.data import DEFAULT_CROP_PCT, IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from torch import nn

from hgrn_vision.data.spec import DataSpec
from hgrn_vision.data.transforms import normalise
from hgrn_vision.train.teachers import Teacher, _outputs, _timm_names, open_teacher

STUDENT = DataSpec((3, 24, 24), (0.4, 0.5, 0.6), (0.2, 0.25, 0.3), "bicubic", 1.0)
onnxruntime = pytest.importorskip("onnxruntime")


class Small(nn.Module):
    """A convolutional classifier with a feature map."""

    def __init__(self, classes=4, channels=3):
        super().__init__()
        self.conv, self.head = nn.Conv2d(channels, 5, 3, stride=2), nn.Linear(5, classes)

    def forward(self, images):
        features = self.conv(images).relu()
        return self.head(features.mean((2, 3))), features


def export(path, model, size=(16, 16), maps=False, about=None, batch=None, dtype=torch.float32, any_size=False):
    import onnx

    class Wrapped(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, images):
            return self.model(images) if maps else self.model(images)[0]

    outputs = ["logits", "map"][: 1 + maps]
    axes = {"images": {0: "batch"}, "logits": {0: "batch"}, "map": {0: "batch"}}
    if any_size:
        axes["images"] |= {2: "height", 3: "width"}
    example = torch.zeros(batch or 2, 3, *size, dtype=dtype)
    torch.onnx.export(
        Wrapped().eval().to(dtype),
        (example,),
        path,
        dynamo=False,
        input_names=["images"],
        output_names=outputs,
        dynamic_axes=None if batch else {name: axes[name] for name in ["images", *outputs]},
    )
    if about:
        described = onnx.load(path)
        for key, value in about.items():
            described.metadata_props.add(key=key, value=json.dumps(value))
        onnx.save(described, path)
    return str(path)


@pytest.fixture(scope="module")
def pixels():
    return torch.from_numpy(np.random.RandomState(0).randint(0, 256, (3, 3, 24, 24)).astype(np.uint8))


def expected_input(pixels, size, mean, std):
    """The teacher's pixels, computed from the bytes in float64."""
    small = torch.nn.functional.interpolate(pixels.double() / 255, size=size, mode="bilinear", antialias=True)
    return (small - torch.tensor(mean).double().view(3, 1, 1)) / torch.tensor(std).double().view(3, 1, 1)


def test_a_model_folder_answers_at_its_own_size_and_normalisation(tmp_path, pixels):
    model = save_model(tmp_path / "model")
    teacher = open_teacher(f"local-dir:{tmp_path / 'model'}", maps=True)
    assert teacher.spec.input_size == (3, 16, 16) and teacher.class_names == CLASSES
    answer = teacher(normalise(pixels, STUDENT).requires_grad_(), STUDENT)
    own = expected_input(pixels, (16, 16), teacher.spec.mean, teacher.spec.std)
    with torch.no_grad():
        features, maps = model.double().forward_intermediates(own, indices=1)
        want = model.forward_head(features)
    torch.testing.assert_close(answer.logits.double(), want, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(answer.map.double(), maps[-1], atol=1e-4, rtol=1e-4)
    assert teacher.map_channels == 32
    assert not answer.logits.requires_grad and not any(p.requires_grad for p in teacher.network.parameters())


def test_a_run_and_a_plain_folder_are_teachers(tmp_path, pixels):
    save_model(tmp_path / "run" / "model")
    images = normalise(pixels, STUDENT)
    answers = [
        open_teacher(str(path))(images, STUDENT).logits for path in (tmp_path / "run", tmp_path / "run" / "model")
    ]
    assert torch.equal(*answers)


def test_a_teacher_is_known_by_its_weights(tmp_path):
    """Kept answers are those of the same weights, whatever their file is called."""
    save_model(tmp_path / "a")
    same = open_teacher(str(tmp_path / "a")).digest
    shutil.copytree(tmp_path / "a", tmp_path / "copy")
    assert open_teacher(str(tmp_path / "copy")).digest == same
    save_model(tmp_path / "a", seed=1)
    assert open_teacher(str(tmp_path / "a")).digest != same
    files = [export(tmp_path / f"{name}.onnx", Small()) for name in "ab"]
    shutil.copy(files[0], tmp_path / "copy.onnx")
    first, second, copy = (open_teacher(str(file)).digest for file in (*files, tmp_path / "copy.onnx"))
    assert first == copy != second and len({same, first, second}) == 3


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.float16, 2e-2)])
def test_an_onnx_file_answers_in_its_own_precision_and_size(tmp_path, pixels, dtype, tolerance):
    torch.manual_seed(0)
    about = {"class_names": ["a", "b", "c", "d"], "mean": [0.5] * 3, "std": [0.25] * 3}
    path = export(tmp_path / "t.onnx", Small(), maps=True, about=about, dtype=dtype)
    torch.manual_seed(0)
    model = Small().double()
    teacher = open_teacher(path, maps=True)
    assert teacher.class_names == about["class_names"] and teacher.map_channels == 5
    answer = teacher(normalise(pixels, STUDENT), STUDENT)
    with torch.no_grad():
        logits, maps = model(expected_input(pixels, (16, 16), about["mean"], about["std"]))
    torch.testing.assert_close(answer.logits.double(), logits, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(answer.map.double(), maps, atol=tolerance, rtol=tolerance)
    assert answer.logits.dtype == torch.float32


def test_mean_std_and_size_can_be_said(tmp_path, pixels):
    timm_teacher = open_teacher(_untrained(tmp_path), side=20, mean=(0.1, 0.2, 0.3), std=(0.5, 0.6, 0.7))
    assert timm_teacher.spec[:3] == ((3, 20, 20), (0.1, 0.2, 0.3), (0.5, 0.6, 0.7))


def _untrained(tmp_path):
    save_model(tmp_path / "some model")
    return f"local-dir:{tmp_path / 'some model'}"


def test_a_thousand_outputs_are_imagenets(tmp_path):
    teacher = open_teacher(export(tmp_path / "t.onnx", Small(1000)))
    assert teacher.class_names[281] == "tabby" and "n02123045" in teacher.aliases[281]


def test_a_teacher_without_class_names_says_so(tmp_path):
    assert open_teacher(export(tmp_path / "t.onnx", Small(4))).class_names is None


def test_bad_teachers_are_named(tmp_path):
    with pytest.raises(ValueError, match="no such file: .*none.onnx"):
        open_teacher(str(tmp_path / "none.onnx"))
    (tmp_path / "text.onnx").write_text("no model")
    with pytest.raises(ValueError, match="text.onnx is not an ONNX model that runs here"):
        open_teacher(str(tmp_path / "text.onnx"))
    torch.onnx.export(nn.Linear(3, 2), (torch.zeros(1, 3),), tmp_path / "flat.onnx", dynamo=False)
    with pytest.raises(ValueError, match=r"the input of .*flat.onnx is not an image .*\[1, 3\]"):
        open_teacher(str(tmp_path / "flat.onnx"))
    fixed = export(tmp_path / "fixed.onnx", Small(), batch=1)
    with pytest.raises(ValueError, match="only takes batches of 1; export it with a dynamic batch size"):
        open_teacher(fixed)
    with pytest.raises(ValueError, match="takes images of 16x16 pixels only, not 20"):
        open_teacher(export(tmp_path / "t.onnx", Small()), side=20)
    with pytest.raises(ValueError, match="has no feature maps; use --distill logits"):
        open_teacher(export(tmp_path / "t.onnx", Small()), maps=True)
    with pytest.raises(ValueError, match="cannot create teacher no_such_model"):
        open_teacher("no_such_model")
    about = {"class_names": ["a", "b"]}
    with pytest.raises(ValueError, match="names 2 classes but has 4 outputs"):
        open_teacher(export(tmp_path / "t.onnx", Small(), about=about))


def test_a_teacher_that_cannot_take_the_size_is_named(tmp_path):
    with pytest.raises(ValueError, match="does not run on images of 3x2x2"):
        open_teacher(export(tmp_path / "t.onnx", Small(), any_size=True), side=2)


def test_an_onnx_file_is_told_its_pixels_by_flags_its_own_notes_or_imagenet(tmp_path):
    about = {"input_size": [3, 20, 20], "mean": [0.1] * 3, "std": [0.2] * 3, "interpolation": "bilinear"}
    noted = export(tmp_path / "noted.onnx", Small(), any_size=True, about={**about, "crop_pct": 0.5})
    assert open_teacher(noted).spec == DataSpec((3, 20, 20), (0.1,) * 3, (0.2,) * 3, "bilinear", 0.5)
    told = open_teacher(noted, side=18, mean=(0.3,) * 3, std=(0.4,) * 3).spec
    assert told[:3] == ((3, 18, 18), (0.3,) * 3, (0.4,) * 3)
    plain = open_teacher(export(tmp_path / "plain.onnx", Small())).spec
    assert plain == DataSpec((3, 16, 16), IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD, "bicubic", DEFAULT_CROP_PCT)


def test_a_grey_onnx_file_wants_one_channel(tmp_path):
    path = tmp_path / "grey.onnx"
    model = nn.Sequential(nn.Conv2d(1, 4, 16), nn.Flatten())
    axes = {"images": {0: "batch"}, "logits": {0: "batch"}}
    names = {"input_names": ["images"], "output_names": ["logits"], "dynamic_axes": axes}
    torch.onnx.export(model, (torch.zeros(2, 1, 16, 16),), path, dynamo=False, **names)
    spec = open_teacher(str(path)).spec
    assert spec.input_size == (1, 16, 16) and len(spec.mean) == len(spec.std) == 1


@pytest.mark.parametrize("key", [str, int])
def test_class_names_may_be_written_by_number(key):
    names = {key(number): name for number, name in ((1, "b"), (0, "a"), (2, "c"))}
    model = nn.Module()
    model.pretrained_cfg = {"label_names": names}
    assert _timm_names(model) == ["a", "b", "c"]
    model.pretrained_cfg = {}
    assert _timm_names(model) is None


def test_timm_models_of_every_kind(tmp_path, monkeypatch):
    """Freshly created timm models, whose weights need no download."""
    create = timm.create_model
    monkeypatch.setattr(timm, "create_model", lambda name, pretrained, **options: create(name, **options))
    # a convolutional model takes any size and has no argument for it
    assert open_teacher("test_resnet", side=40).spec.input_size == (3, 40, 40)
    with pytest.raises(ValueError, match="teacher test_resnet has no classification head"):
        monkeypatch.setattr(timm, "create_model", lambda name, **options: create(name, num_classes=0))
        open_teacher("test_resnet")
    monkeypatch.setattr(timm, "create_model", lambda name, **options: create(name, drop_rate=0.9))
    teacher = open_teacher("test_vit", maps=True)
    images = torch.randn(2, 3, 40, 40)
    first, second = teacher(images, STUDENT), teacher(images, STUDENT)
    # no dropout: the teacher answers and does not learn
    assert torch.equal(first.logits, second.logits) and torch.equal(first.map, second.map)


@pytest.mark.parametrize("mean, std", [(0.5, 0.25), (0.25, 0.5)])
def test_pixels_are_converted_where_either_figure_differs(mean, std):
    seen = []
    network = nn.Module()
    network.forward = lambda images: seen.append(images)
    own = STUDENT._replace(mean=(0.5,) * 3, std=(0.5,) * 3)
    theirs = STUDENT._replace(mean=(mean,) * 3, std=(std,) * 3)
    pixels = torch.rand(1, 3, 24, 24)
    Teacher("any", network, theirs, None, 2)((pixels - 0.5) / 0.5, own)
    torch.testing.assert_close(seen[0], (pixels - mean) / std)


def test_logits_and_maps_are_told_by_their_shape():
    tokens, logits, last_map = (SimpleNamespace(shape=["batch", *sizes]) for sizes in ([9, 5], [4], [5, 3, 3]))
    session = SimpleNamespace(get_outputs=lambda: [tokens, last_map, logits])
    assert _outputs("t.onnx", session, maps=True) == (logits, last_map)
    assert _outputs("t.onnx", session, maps=False) == (logits, None)
    session.get_outputs = lambda: [tokens]
    with pytest.raises(ValueError, match="t.onnx has no output of shape"):
        _outputs("t.onnx", session, maps=False)


def test_an_onnx_teacher_takes_as_many_threads_as_torch_and_does_not_spin(tmp_path, monkeypatch):
    """A rank has its share of the cores, and the student needs them as soon as the teacher has answered."""
    asked, session = [], onnxruntime.InferenceSession

    def create(name, options, **others):
        spins = options.get_session_config_entry("session.intra_op.allow_spinning")
        asked.append((options.intra_op_num_threads, spins))
        return session(name, options, **others)

    monkeypatch.setattr(onnxruntime, "InferenceSession", create)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    open_teacher(export(tmp_path / "teacher.onnx", Small()))
    assert asked == [(3, "0")]
