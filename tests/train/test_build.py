"""From settings to a model, its loss and its optimizer."""

import copy
from dataclasses import replace

import pytest
import timm
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from training import SMALL, Setup, digits

from hgrn_vision.train.build import (
    build_model,
    build_optimizer,
    build_task,
    build_teacher,
    data_spec,
    load_body,
    precision,
    rebuild_model,
)
from hgrn_vision.train.checkpoint import Checkpoint
from hgrn_vision.train.config import to_mapping
from hgrn_vision.train.distributed import World
from hgrn_vision.train.engine import Engine

CPU = torch.device("cpu")


def learned(**settings) -> set[str]:
    """The parts of the model that a few steps changed."""
    setup = Setup(digits(**settings))
    before = copy.deepcopy(setup.engine.model.state_dict())
    setup.run(2)
    changed = [
        name for name, tensor in setup.engine.model.state_dict().items() if not torch.equal(tensor, before[name])
    ]
    return {".".join(name.split(".")[:2]) if name.startswith("blocks") else name.split(".")[0] for name in changed}


def test_freeze_counts_layers_from_the_image_on():
    everything = {"patch_embed", "lower_bound", "blocks.0", "blocks.1", "head"}
    assert learned() == everything
    assert learned(freeze="1") == everything - {"patch_embed", "lower_bound"}
    assert learned(freeze="2") == {"blocks.1", "head"}
    assert learned(freeze="body") == {"head"}
    assert learned(freeze="3") == {"head"}
    with pytest.raises(ValueError, match="cannot freeze 4 layers: the model has 3 before its head"):
        Setup(digits(freeze="4"))
    with pytest.raises(ValueError, match="freeze must be body or a number of layers, got 'head'"):
        digits(freeze="head")


def test_first_weights_are_taken_over_and_the_head_is_new():
    other, model = build_model(digits(seed=1), 7), build_model(digits(), 10)
    head = model.head.weight.clone()
    load_body(model, other.state_dict(), seed=0)
    # a head from the same seed would be the one that these weights were trained with
    assert model.head.weight.shape == (10, 16) and not torch.equal(model.head.weight, head)
    for name, tensor in model.state_dict().items():
        assert name.startswith("head.") or torch.equal(tensor, other.state_dict()[name]), name
    deeper = build_model(digits(model_args={**SMALL, "depth": 3}), 7)
    with pytest.raises(ValueError, match="the initial weights do not fit the model: .*blocks.2"):
        load_body(model, deeper.state_dict(), seed=0)


def test_first_weights_suit_other_patches_and_a_local_convolution():
    other = build_model(digits(seed=1), 7)
    model = build_model(digits(model_args={**SMALL, "patch_size": 4, "local_conv": 3}), 10)
    load_body(model, other.state_dict(), seed=0)
    # patches twice as large on an image twice as large: nearly the same tokens
    image = torch.nn.functional.interpolate(torch.randn(1, 3, 4, 4), size=16, mode="bicubic")
    large = torch.nn.functional.interpolate(image, scale_factor=4 // other.patch_embed.patch_size[0], mode="bicubic")
    (tokens, _), (same, _) = other.embed(image), model.embed(large)
    assert (tokens - same).abs().max() < 0.2 * tokens.abs().max()
    features = other.forward_features(image)
    assert (model.forward_features(large) - features).abs().max() < 0.2 * features.abs().max()


class Dtypes(TorchDispatchMode):
    """Records the dtypes that operations return."""

    def __init__(self):
        super().__init__()
        self.seen = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.seen |= {out.dtype} if isinstance(out, torch.Tensor) else set()
        return out


@pytest.mark.parametrize("precision, halved", [("auto", False), ("fp32", False), ("bf16", True)])
def test_muon_keeps_to_float32_on_cpus_unless_they_train_in_bfloat16(precision, halved):
    model = torch.nn.Linear(8, 16)
    optimizer = build_optimizer(digits(opt="muon", precision=precision), model)
    model(torch.randn(3, 8)).square().sum().backward()
    before = model.weight.clone()
    with Dtypes() as dtypes:
        optimizer.step()
    assert dtypes.seen == {torch.float32} | ({torch.bfloat16} if halved else set())
    assert not torch.equal(model.weight, before)


def test_machine_settings_reach_the_model(monkeypatch):
    compiled = []
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self: compiled.append(self))
    engine = Setup(digits(grad_checkpointing=True, channels_last=True, compile=True)).engine
    assert compiled == [engine.model]
    assert engine.model.grad_checkpointing
    assert engine.model.patch_embed.proj.weight.is_contiguous(memory_format=torch.channels_last)


def test_a_convolutional_model_needs_no_image_size():
    losses = Setup(digits(model="resnet10t", model_args={}, img_size=32)).run(1)
    assert losses[0] > 0


@pytest.mark.parametrize(
    "error, words",
    [
        (ZeroDivisionError("division by zero"), "division by zero"),
        (KeyError("missing"), "KeyError: 'missing'"),
        (AttributeError("no such part"), "no such part"),
        (AssertionError(), "AssertionError"),
    ],
)
def test_whatever_a_model_raises_is_one_line(monkeypatch, error, words):
    def fail(*args, **kwargs):
        raise error

    monkeypatch.setattr(timm, "create_model", fail)
    with pytest.raises(ValueError, match=f"^cannot create model hgrn_deit_tiny: {words}$"):
        build_model(digits(), 10)


def test_a_teacher_of_other_classes_is_refused(teacher):
    config = digits(teacher=teacher)
    student = build_model(config, 7)
    with pytest.raises(ValueError, match="has 10 classes, the data 7"):
        Engine(config, World(), student, data_spec(config, student), 1, build_teacher(config, torch.device("cpu")))


def test_pretrained_weights_start_a_run_with_a_new_head(teacher):
    config = digits(model=teacher, model_args={}, img_size=None)
    model, fresh = build_model(config, 7, pretrained=True), build_model(config, 7, pretrained=False)
    published = timm.create_model(teacher, pretrained=True)
    assert torch.equal(model.patch_embed.proj.weight, published.patch_embed.proj.weight)
    assert not torch.equal(model.patch_embed.proj.weight, fresh.patch_embed.proj.weight)
    assert model.head.weight.shape[0] == 7


def test_a_new_head_is_a_function_of_the_seed():
    weights, heads = build_model(digits(seed=1), 7).state_dict(), []
    for seed, noise in ((0, 1), (0, 2), (5, 1)):
        model = build_model(digits(), 10)
        torch.manual_seed(noise)
        load_body(model, weights, seed)
        heads.append(model.head.weight)
    assert torch.equal(heads[0], heads[1]) and not torch.equal(heads[0], heads[2])


def test_a_checkpoint_becomes_a_model_for_use():
    config = digits(drop_path=0.5)
    first, averaged = (build_model(replace(config, seed=seed), 3).state_dict() for seed in (1, 2))
    model = rebuild_model(Checkpoint(first, averaged, config=to_mapping(config), class_names=["a", "b", "c"]))
    assert not model.training and model.pretrained_cfg["num_classes"] == 3
    assert all(torch.equal(tensor, averaged[name]) for name, tensor in model.state_dict().items())
    model = rebuild_model(Checkpoint(first, config=to_mapping(config), class_names=["a", "b", "c"]))
    assert all(torch.equal(tensor, first[name]) for name, tensor in model.state_dict().items())


def test_auto_is_bf16_on_gpus_alone():
    gpu = torch.device("cuda")
    assert [precision(digits(), device) for device in (CPU, gpu)] == ["fp32", "bf16"]
    assert [precision(digits(precision="fp16"), device) for device in (CPU, gpu)] == ["fp16", "fp16"]


def test_classes_do_not_matter_for_features(teacher):
    config = digits(teacher=teacher, distill="features")
    opened = build_teacher(config, CPU)
    tasks = [build_task(config, build_model(config, 7), CPU, opened) for _ in range(2)]
    assert opened.map_channels == 24 and not tasks[0].by_logits
    first, second = (task.trainable_module.projection.weight for task in tasks)
    assert torch.equal(first, second)
    torch.manual_seed(1)
    again = build_task(config, build_model(config, 7), CPU, opened).trainable_module.projection.weight
    assert torch.equal(again, first)
    other = build_task(replace(config, seed=1), build_model(config, 7), CPU, opened).trainable_module.projection.weight
    assert not torch.equal(other, first)


@pytest.mark.parametrize(
    "distill, parts", [("logits", (True, False)), ("features", (False, True)), ("both", (True, True))]
)
def test_what_is_learned_from_the_teacher(teacher, distill, parts):
    config = digits(teacher=teacher, distill=distill)
    task = build_task(config, build_model(config, 10), CPU, build_teacher(config, CPU))
    assert (task.by_logits, task.by_maps) == parts


def test_photographs_have_no_labels_to_learn(teacher):
    config = digits(teacher=teacher)
    opened, student = build_teacher(config, CPU), build_model(config, 10)
    assert opened.map_channels is None
    assert build_task(config, student, CPU, opened).criterion is not None
    assert build_task(replace(config, photos=("folder",)), student, CPU, opened).criterion is None


def test_adamw_is_fused_and_others_have_no_such_option():
    model = build_model(digits(), 10)
    assert build_optimizer(digits(opt="adamw"), model).defaults["fused"]
    assert "fused" not in build_optimizer(digits(opt="lion"), model).defaults
