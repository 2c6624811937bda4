"""The optimizer step against a plain loop, the settings that change it, and numbers that are not finite."""

import ast
import copy
import functools
import sys
from dataclasses import fields, replace

import pytest
import timm
import torch
import torch.nn.functional as F
from training import SMALL, Setup, digits

from hgrn_vision.data.transforms import BatchTransform
from hgrn_vision.randomness import fold, seed_all
from hgrn_vision.train import trackers
from hgrn_vision.train.build import build_model, build_teacher, data_spec, load_body
from hgrn_vision.train.config import TrainConfig
from hgrn_vision.train.distributed import World, check_ranks, start
from hgrn_vision.train.engine import Engine
from hgrn_vision.train.evaluation import evaluate
from hgrn_vision.train.faults import OutOfMemory, smaller_micro_batch
from hgrn_vision.train.run_folder import export_model

CPU = torch.device("cpu")


def test_step_is_a_plain_loop_of_gradient_accumulation():
    """Written out with torch alone: seed, mixup, soft cross entropy, mean over micro-batches, clip, AdamW."""
    config = digits(mixup=0.8, cutmix=1.0, drop_path=0.3, clip_grad=0.5, weight_decay=0.1, lr=1e-3, min_lr=1e-3)
    setup = Setup(config)
    losses = setup.run(3)

    model = build_model(config, 10)
    transform = BatchTransform(config, data_spec(config, model), 10)
    exempt = model.no_weight_decay()
    plain, decayed = [], []
    for name, parameter in model.named_parameters():
        (plain if parameter.ndim <= 1 or name in exempt else decayed).append(parameter)
    groups = [{"params": plain, "weight_decay": 0.0}, {"params": decayed, "weight_decay": 0.1}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=config.betas, eps=config.opt_eps)
    wanted = []
    for step, batches in enumerate(setup.loader.epoch(0)):
        total = 0.0
        for batch in batches:
            seed_all(fold(config.seed, 0, 0, step, batch.number), CPU)
            images, targets = transform.train(batch.images, batch.targets)
            loss = -(targets * F.log_softmax(model(images), dim=-1)).sum(-1).mean()
            (loss / len(batches)).backward()
            total += loss.item() / len(batches)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        wanted.append(total)
    assert losses == pytest.approx(wanted, abs=1e-6)
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(setup.engine.model.state_dict()[name], tensor, atol=1e-5, rtol=1e-4, msg=name)


def result(**settings) -> tuple:
    setup = Setup(digits(**settings))
    losses = setup.run(2)
    score = evaluate(setup.engine.eval_model, setup.eval_loader, setup.engine.transform, setup.config, World())
    return losses, setup.weights(), score.loss, score.images


@functools.cache
def base_result(others: str) -> tuple:
    return result(**{**BASE, **ast.literal_eval(others)})


BASE = {"mixup": 0.8, "cutmix": 1.0, "reprob": 0.2, "auto_augment": "rand-m9-mstd0.5-inc1", "weight_decay": 0.5}
OPTIONS = [  # the setting, and others that it needs to matter
    ("eval_images", 32, {}),
    ("model", "deit_tiny_patch16_224", {"model_args": {"patch_size": 2, "embed_dim": 12, "depth": 1}}),
    ("model_args", {**SMALL, "depth": 3}, {}),
    ("img_size", 12, {}),
    ("drop_path", 0.5, {}),
    ("freeze", "1", {}),
    ("epochs", 3, {}),
    ("epoch_steps", 2, {}),
    ("balance", True, {}),
    ("batch_size", 96, {}),
    ("micro_batch", 16, {}),
    ("seed", 1, {}),
    ("opt", "lion", {}),
    ("lr", 1e-2, {}),
    ("betas", (0.5, 0.9), {}),
    ("opt_eps", 1e-2, {}),
    ("momentum", 0.5, {"opt": "sgd"}),
    ("weight_decay", 0.0, {}),
    ("layer_decay", 0.5, {}),
    ("clip_grad", 1e-3, {"opt": "sgd"}),
    ("sched", "poly", {}),
    ("warmup_epochs", 1.0, {}),
    ("warmup_lr", 1e-4, {"warmup_epochs": 1.0}),
    ("min_lr", 5e-4, {}),
    ("ema", 0.9, {}),
    ("loss", "bce", {}),
    ("smoothing", 0.0, {}),
    ("repeats", 2, {}),
    ("auto_augment", "", {}),
    ("color_jitter", 0.9, {"auto_augment": ""}),
    ("scale", (0.2, 0.3), {}),
    ("ratio", (0.3, 0.4), {}),
    ("hflip", 1.0, {}),
    ("vflip", 1.0, {}),
    ("mixup", 0.2, {"cutmix": 0.0}),
    ("cutmix", 0.1, {"mixup": 0.0}),
    ("mixup_prob", 0.0, {}),
    ("mixup_switch", 1.0, {}),
    ("mixup_mode", "elem", {}),
    ("reprob", 1.0, {}),
    ("interpolation", "nearest", {"img_size": 12}),
    ("crop_pct", 0.5, {}),
    ("mean", (0.9, 0.9, 0.9), {}),
    ("std", (0.9, 0.9, 0.9), {}),
    ("precision", "bf16", {}),
]
ELSEWHERE = {  # recipe settings that other tests see the effect of: of data sources, distillation, the end, the name
    *("dataset", "train_split", "val_split", "holdout", "classes", "input_key", "target_key"),
    *(
        "teacher",
        "teacher_size",
        "teacher_mean",
        "teacher_std",
        "distill",
        "pack",
        "first_sizes",
        "distill_weight",
        "distill_temperature",
        "pretrained",
        "patience",
        "recipe",
    ),
}


def test_no_setting_is_left_out():
    recipe = {item.name for item in fields(TrainConfig) if item.metadata["kind"] == "recipe"}
    assert recipe == {name for name, _, _ in OPTIONS if name != "precision"} | ELSEWHERE


@pytest.mark.parametrize("name, value, others", OPTIONS, ids=[name for name, _, _ in OPTIONS])
def test_every_setting_does_something(name, value, others):
    losses, weights, score, images = base_result(repr(others))
    other = result(**{**BASE, **others, name: value})
    same = losses == other[0] and weights.shape == other[1].shape and torch.equal(weights, other[1])
    assert not (same and score == other[2] and images == other[3])


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
    with pytest.raises(ValueError, match="cannot freeze 9 layers: the model has 3 before its head"):
        Setup(digits(freeze="9"))
    with pytest.raises(ValueError, match="freeze must be body or a number of layers, got 'head'"):
        digits(freeze="head")


def test_first_weights_are_taken_over_and_the_head_is_new():
    other, model = build_model(digits(seed=1), 7), build_model(digits(), 10)
    head = model.head.weight.clone()
    load_body(model, other.state_dict(), seed=0)
    # a head of the same seed would be the one that these weights were trained for
    assert model.head.weight.shape == (10, 16) and not torch.equal(model.head.weight, head)
    for name, tensor in model.state_dict().items():
        assert name.startswith("head.") or torch.equal(tensor, other.state_dict()[name]), name
    deeper = build_model(digits(model_args={**SMALL, "depth": 3}), 7)
    with pytest.raises(ValueError, match="the initial weights do not fit the model: .*blocks.2"):
        load_body(model, deeper.state_dict(), seed=0)


@pytest.mark.parametrize("setting", ["grad_checkpointing", "channels_last"])
def test_machine_settings_do_not_change_the_result(setting):
    losses, weights, score, _ = result(drop_path=0.3)
    other = result(drop_path=0.3, **{setting: True})
    assert other[0] == pytest.approx(losses, abs=1e-5)
    torch.testing.assert_close(other[1], weights, atol=1e-5, rtol=1e-4)


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


@pytest.fixture
def poisoned(monkeypatch):
    """An engine whose loss is NaN in the steps of a set."""
    setup = Setup(digits(epoch_steps=8, ema=0.9))
    steps: set[int] = set()
    whole = Engine._backward

    def backward(self, batch, count, last):
        loss = whole(self, batch, count, last)
        if self.progress.step in steps:
            self.parameters[0].grad.fill_(float("nan"))
        return loss

    monkeypatch.setattr(Engine, "_backward", backward)
    return setup, steps


def test_a_bad_step_is_skipped_and_counted(poisoned):
    setup, steps = poisoned
    steps.update({1, 2})
    progress = setup.engine.progress
    setup.run(1)
    before, state = setup.weights(), setup.engine.optimizer.state_dict()["state"][0]["step"].clone()
    setup.run(2)
    assert torch.equal(setup.weights(), before)
    assert torch.equal(setup.engine.optimizer.state_dict()["state"][0]["step"], state)
    assert (progress.skipped, progress.streak, progress.updates, progress.loss_count) == (2, 2, 3, 1)
    setup.run(1)
    assert not torch.equal(setup.weights(), before)
    assert (progress.skipped, progress.streak, progress.updates, progress.loss_count) == (2, 0, 4, 2)


def test_an_overflow_that_the_fp16_scaler_cures_is_not_counted():
    setup = Setup(digits(precision="fp16"))
    engine = setup.engine
    engine.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**120)
    before = setup.weights()
    setup.run(1)
    assert torch.equal(setup.weights(), before)
    assert engine.scaler.get_scale() == 2.0**119
    assert (engine.progress.skipped, engine.progress.streak, engine.progress.loss_count) == (0, 0, 0)
    engine.scaler.update(2.0**10)
    setup.run(1)
    assert not torch.equal(setup.weights(), before)
    # a scale that can shrink no further does not hide a gradient that is never finite
    engine.scaler.update(1.0)
    engine.parameters[0].data.fill_(float("nan"))
    setup.run(1)
    assert engine.progress.skipped == 1


def test_out_of_memory_names_the_micro_batch_to_try(monkeypatch):
    setup = Setup(digits(batch_size=96, micro_batch=48))

    def exhausted(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    setup.engine.task.forward = exhausted
    with pytest.raises(OutOfMemory, match="micro-batch 48: try --micro-batch 24 .*--grad-checkpointing"):
        setup.run(1)
    assert smaller_micro_batch(setup.config, ranks=4) == 24
    assert smaller_micro_batch(digits(batch_size=80, micro_batch=40), ranks=4) == 20
    assert smaller_micro_batch(digits(batch_size=4, micro_batch=2), ranks=2) is None


def test_ranks_that_do_not_divide_the_batch_are_told_which_would():
    config = digits(batch_size=96, micro_batch=16)
    check_ranks(config, 3)
    with pytest.raises(ValueError, match="4 processes cannot share 6 micro-batches .* 1, 2, 3, 6 processes would work"):
        check_ranks(config, 4)


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    """A model folder that knows the digits' classes, wider than the student."""
    config = digits(model_args={**SMALL, "embed_dim": 24})
    folder = tmp_path_factory.mktemp("teacher") / "model"
    setup = Setup(config)
    setup.run(2)
    export_model(folder, setup.engine.model, config, setup.train.class_names)
    return f"local-dir:{folder}"


def test_distillation_by_logits_is_the_formula(teacher):
    config = digits(teacher=teacher, distill_weight=0.7, distill_temperature=3.0, batch_size=32)
    setup = Setup(config)
    plain = Setup(replace(config, teacher="")).run(1)[0]
    batch = next(setup.loader.epoch(0))[0]
    images = setup.engine.transform.eval(batch.images)
    with torch.no_grad():
        student = F.log_softmax(setup.engine.model(images) / 3, -1)
        wise = timm.create_model(teacher, pretrained=True).eval()
        target = F.log_softmax(wise(images) / 3, -1)
    divergence = (target.exp() * (target - student)).sum(-1).mean() * 9
    assert setup.run(1)[0] == pytest.approx(plain + 0.7 * divergence.item(), abs=1e-5)


def test_distillation_by_features_trains_its_projection_and_resumes(teacher):
    config = digits(teacher=teacher, distill="features", distill_weight=2.0, epoch_steps=4)
    setup = Setup(config)
    first = setup.run(2)
    assert first[0] != Setup(replace(config, distill_weight=0.0)).run(1)[0]
    other = Setup(config)
    assert not torch.equal(other.engine.projection.weight, setup.engine.projection.weight)
    other.engine.restore(copy.deepcopy(setup.engine.checkpoint()))
    assert other.run(2) == setup.run(2)
    assert torch.equal(other.engine.projection.weight, setup.engine.projection.weight)
    assert not setup.engine.teacher.network.model.training


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


def test_threads_of_a_rank():
    before = torch.get_num_threads()
    try:
        assert start(digits(threads=2)).size == 1
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_trackers_that_are_not_installed_say_so(monkeypatch):
    for name in ("torch.utils.tensorboard", "wandb"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match="--tensorboard needs the package tensorboard: pip install tensorboard"):
        trackers.check_trackers(digits(tensorboard=True))
    with pytest.raises(ImportError, match="--wandb needs the package wandb: pip install wandb"):
        trackers.check_trackers(digits(wandb="project"))
