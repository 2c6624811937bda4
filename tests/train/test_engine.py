"""The optimizer step against a plain loop, the settings that change it, and numbers that are not finite."""

import ast
import contextlib
import copy
import functools
import math
from dataclasses import fields, replace
from types import SimpleNamespace

import pytest
import timm
import torch
import torch.nn.functional as F
from timm.task import ClassificationTask
from training import SMALL, Setup, digits

from hgrn_vision.data.transforms import BatchTransform
from hgrn_vision.randomness import fold, seed_all
from hgrn_vision.train.build import build_model, data_spec
from hgrn_vision.train.config import TrainConfig
from hgrn_vision.train.distributed import World
from hgrn_vision.train.engine import Engine, Progress
from hgrn_vision.train.evaluation import evaluate

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
ELSEWHERE = {  # recipe settings whose effect other tests check: data sources, distillation, when a run ends, names
    *("dataset", "train_split", "val_split", "holdout", "classes", "input_key", "target_key"),
    *(
        "teacher",
        "teacher_size",
        "teacher_mean",
        "teacher_std",
        "distill",
        "pack",
        "views",
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


@pytest.mark.parametrize("setting", ["grad_checkpointing", "channels_last"])
def test_machine_settings_do_not_change_the_result(setting):
    losses, weights, score, _ = result(drop_path=0.3)
    other = result(drop_path=0.3, **{setting: True})
    assert other[0] == pytest.approx(losses, abs=1e-5)
    torch.testing.assert_close(other[1], weights, atol=1e-5, rtol=1e-4)


@pytest.fixture
def poisoned(monkeypatch):
    """An engine whose loss is NaN in the given steps."""
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
    # once the scale cannot shrink any further, a gradient that is not finite counts as bad
    for scale, bad in ((2.0, False), (1.0, True)):
        engine.scaler.update(scale)
        result = engine._agree(0.5, torch.tensor(float("inf")))
        assert (result.applied, result.bad) == (False, bad)
    # a loss that is not finite is bad at any scale
    engine.scaler.update(2.0)
    assert engine._agree(float("nan"), torch.tensor(1.0)).bad


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


def test_the_next_epoch_and_the_same_one_again_begin_at_zero():
    for begin, epoch, updates in ((Progress.next_epoch, 3, 25), (Progress.repeat_epoch, 2, 20)):
        progress = Progress(2, 5, 25, 1, 1, 1, loss_sum=3.0, loss_count=4, seconds=9.0, waited=2.0, history=[{}])
        begin(progress)
        assert progress == Progress(epoch, 0, updates, 1, 1, 1, history=[{}])


def test_the_average_warms_up():
    """The first update is the weights themselves; then 1 - (1 + n)^(-3/4) of the average is kept, at most `ema`."""
    setup = Setup(digits(ema=0.5, epoch_steps=8))
    average = None
    for number in range(4):
        setup.run(1)
        weights = torch.cat([tensor.flatten().clone() for tensor in setup.engine.model.state_dict().values()])
        kept = min(0.5, 1 - (1 + number) ** -0.75)
        average = weights if average is None else kept * average + (1 - kept) * weights
        torch.testing.assert_close(setup.weights(), average, atol=1e-6, rtol=1e-5)


def test_the_learning_rate_that_is_shown_is_the_heads():
    engine = Setup(digits(layer_decay=0.5, lr=1e-3)).engine
    rates = [group["lr"] for group in engine.optimizer.param_groups]
    assert engine.lr == pytest.approx(1e-3) and min(rates) < 0.5e-3


def test_the_scale_of_fp16_is_kept_in_the_checkpoint():
    setups = [Setup(digits(precision="fp16")) for _ in range(2)]
    for setup in setups:
        setup.run(1)
    setups[0].engine.scaler.update(2.0**7)
    setups[1].engine.restore(copy.deepcopy(setups[0].engine.checkpoint()))
    assert setups[1].engine.scaler.get_scale() == 2.0**7


def test_ranks_agree_on_the_mean_and_on_what_is_bad():
    engine = Setup(digits()).engine
    for other, want in (
        ([4.0, 0, 0], (3.0, True, False)),
        ([0.0, 1, 0], (1.0, False, True)),
        ([0, 0, 1], (1, False, True)),
    ):
        engine.world = SimpleNamespace(
            size=2, sum=lambda numbers, other=other: [a + b for a, b in zip(numbers, other, strict=True)]
        )
        result = engine._agree(2.0, torch.tensor(1.0))
        assert (result.loss, result.applied, result.bad) == want


def test_the_schedule_begins_at_its_beginning():
    """Three steps of warm-up, then a cosine over all six."""
    setup = Setup(digits(epochs=2, warmup_epochs=1.0, warmup_lr=1e-5, lr=1e-3, min_lr=0.0))
    rates = []
    for _ in range(2):
        for _ in range(3):
            setup.run(1)
            rates.append(setup.engine.lr)
        setup.engine.progress.next_epoch()
    warmup = [1e-5 + (1e-3 - 1e-5) * step / 3 for step in range(3)]
    cosine = [0.5e-3 * (1 + math.cos(math.pi * step / 6)) for step in range(3, 6)]
    assert rates == pytest.approx(warmup + cosine)


def test_options_of_the_optimizer_are_the_settings_and_not_the_checkpoints():
    old, new = Setup(digits(weight_decay=0.1)), Setup(digits(weight_decay=0.3, betas=(0.5, 0.6), opt_eps=1e-3))
    old.run(1)
    new.engine.restore(copy.deepcopy(old.engine.checkpoint()))
    groups = new.engine.optimizer.param_groups
    assert {group["weight_decay"] for group in groups} == {0.0, 0.3}
    assert {(tuple(group["betas"]), group["eps"]) for group in groups} == {((0.5, 0.6), 1e-3)}
    assert len(new.engine.optimizer.state_dict()["state"]) == len(new.engine.parameters)


def test_images_reach_the_model_at_the_sides_of_their_epoch():
    setup = Setup(digits(epochs=4, first_sizes="4x1,6x2", channels_last=True))
    seen = []
    setup.engine.model.register_forward_pre_hook(lambda model, args: seen.append(args[0]))
    for _ in range(4):
        setup.run(1)
        setup.engine.progress.next_epoch()
    # two micro-batches in a step
    assert [images.shape[-2:] for images in seen[::2]] == [(4, 4), (6, 6), (6, 6), (8, 8)]
    assert seen[-1].is_contiguous(memory_format=torch.channels_last) and not seen[-1].is_contiguous()


def test_ranks_exchange_gradients_once_in_a_step():
    setup, events = Setup(digits(micro_batch=16)), []

    @contextlib.contextmanager
    def no_sync():
        events.append("alone")
        yield
        events.append("end")

    setup.engine.task.no_sync = no_sync
    setup.engine.model.register_forward_pre_hook(lambda *_: events.append("batch"))
    setup.engine.model.head.weight.register_hook(lambda grad: events.append("gradient"))
    setup.run(1)
    assert events == ["alone", "batch", "gradient", "end"] * 3 + ["batch", "gradient"]


@pytest.mark.parametrize("device, ids", [("cpu", None), ("cuda:1", [1])])
def test_a_run_of_several_ranks_is_prepared_for_them(device, ids, monkeypatch):
    made = []
    monkeypatch.setattr(ClassificationTask, "prepare_distributed", lambda self, **options: made.append(options))
    monkeypatch.setattr(torch.nn.Module, "to", lambda self, *args, **options: self)
    config = digits(opt="sgd")
    model = build_model(config, 10)
    Engine(config, World(0, 2, device=torch.device(device)), model, data_spec(config, model), 3)
    assert made == [{"device_ids": ids, "gradient_as_bucket_view": True}]
