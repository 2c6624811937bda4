"""From settings to a model, its loss, its optimizer and its schedule, built with timm."""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import timm
import torch
from timm.loss import BinaryCrossEntropy, SoftTargetCrossEntropy
from timm.models import group_parameters
from timm.optim import create_optimizer_v2, muon
from timm.scheduler import create_scheduler_v2
from timm.scheduler.scheduler import Scheduler
from timm.task import ClassificationTask
from timm.task.task import TrainingTask
from torch import nn

from ..data.spec import DataSpec, resolve_spec
from ..hgrn import HgrnDeit
from ..randomness import seed_weights
from ..weights import checkpoint_filter_fn
from .checkpoint import Checkpoint
from .config import TrainConfig, from_mapping
from .distillation import DistillationTask
from .faults import reason
from .teachers import Teacher, open_teacher

_newton_schulz = muon.zeropower_via_newtonschulz

DTYPES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


def build_model(config: TrainConfig, num_classes: int, pretrained: bool = False) -> nn.Module:
    """The model with a head for `num_classes` classes; new weights depend on the seed alone."""
    seed_weights(config.seed)
    arguments = dict(config.model_args)
    if config.drop_path:
        arguments["drop_path_rate"] = config.drop_path
    if config.img_size:
        arguments["img_size"] = config.img_size
    try:
        model = _create(config.model, num_classes, pretrained, arguments)
    except (ValueError, OSError, ImportError):
        raise
    except Exception as error:
        # constructors fail in any way with arguments that they do not expect
        raise ValueError(f"cannot create model {config.model}: {reason(error)}") from error
    if config.grad_checkpointing:
        model.set_grad_checkpointing(True)
    freeze(model, config.freeze)
    return model.to(memory_format=torch.channels_last) if config.channels_last else model


def _create(name: str, num_classes: int, pretrained: bool, arguments: dict[str, Any]) -> nn.Module:
    try:
        return timm.create_model(name, pretrained=pretrained, num_classes=num_classes, **arguments)
    except TypeError as error:
        # convolutional models take any size and have no argument for it
        if "'img_size'" not in str(error):
            raise
        arguments = {key: value for key, value in arguments.items() if key != "img_size"}
        return timm.create_model(name, pretrained=pretrained, num_classes=num_classes, **arguments)


def load_body(model: nn.Module, weights: Mapping[str, torch.Tensor], seed: int) -> None:
    """Load all weights except those of the head, which is new; patches are resampled to the model's size."""
    # not the head that the model was created with: a run with the same seed may have trained these weights with it
    seed_weights(seed, 2)
    model.reset_classifier(model.num_classes)
    head = _head(model)
    if isinstance(model, HgrnDeit):
        weights = checkpoint_filter_fn(dict(weights), model)
    body = {name: tensor for name, tensor in weights.items() if name not in head}
    own = {name: tensor for name, tensor in model.state_dict().items() if name in head}
    try:
        model.load_state_dict({**body, **own})
    except RuntimeError as error:
        reason = " ".join(str(error).splitlines()[1].split())
        raise ValueError(f"the initial weights do not fit the model: {reason}") from error


def freeze(model: nn.Module, part: str) -> None:
    """Freeze a part of the model: 'body' is all but the head, a number is that many layers, counted from the input."""
    if not part:
        return
    # the layers that layer decay counts: the patch embedding, each block, then the last norm with the head
    layer = group_parameters(model, model.group_matcher(coarse=False), reverse=True)
    head = _head(model)
    if part == "body":
        frozen = {name for name in layer if name not in head}
    else:
        count = max(layer.values())
        if int(part) > count:
            raise ValueError(f"cannot freeze {part} layers: the model has {count} before its head")
        frozen = {name for name, number in layer.items() if number < int(part)}
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name not in frozen)


def _head(model: nn.Module) -> set[str]:
    """Names of the head's parameters."""
    theirs = {id(parameter) for parameter in model.get_classifier().parameters()}
    return {name for name, parameter in model.named_parameters() if id(parameter) in theirs}


def data_spec(config: TrainConfig, model: nn.Module) -> DataSpec:
    """The pixels that the model expects, except where the settings say otherwise."""
    return resolve_spec(
        model,
        img_size=config.img_size,
        mean=config.mean,
        std=config.std,
        interpolation=config.interpolation,
        crop_pct=config.crop_pct,
    )


def describe_model(model: nn.Module, spec: DataSpec) -> None:
    """Record the pixels that the model is trained on in its pretrained_cfg, so that they are saved with it."""
    model.pretrained_cfg = {**model.pretrained_cfg, **spec._asdict(), "num_classes": model.num_classes}


def rebuild_model(checkpoint: Checkpoint) -> nn.Module:
    """The model of a checkpoint, ready for use: averaged weights if there are any, evaluation mode."""
    config = from_mapping(checkpoint.config)
    model = build_model(config, len(checkpoint.class_names))
    describe_model(model, data_spec(config, model))
    model.load_state_dict(checkpoint.weights())
    return model.eval()


def autocast(config: TrainConfig, device: torch.device) -> AbstractContextManager:
    """The context in which a forward pass runs in the configured precision."""
    dtype = DTYPES[precision(config, device)]
    return torch.autocast(device.type, dtype) if dtype else nullcontext()


def precision(config: TrainConfig, device: torch.device) -> str:
    """The name of the precision, with auto resolved for the device."""
    if config.precision != "auto":
        return config.precision
    return "bf16" if device.type == "cuda" else "fp32"


def build_teacher(config: TrainConfig, device: torch.device) -> Teacher | None:
    """The teacher that the settings name, if any."""
    if not config.teacher:
        return None
    maps = config.distill != "logits"
    return open_teacher(config.teacher, config.teacher_size, config.teacher_mean, config.teacher_std, maps, device)


def build_task(config: TrainConfig, model: nn.Module, device: torch.device, teacher: Teacher | None) -> TrainingTask:
    """The training loss: from labels, a teacher's answers, or both."""
    criterion = SoftTargetCrossEntropy() if config.loss == "ce" else BinaryCrossEntropy(smoothing=0.0)
    if teacher is None:
        return ClassificationTask(model, criterion, device=device, verbose=False)
    by_logits = config.distill != "features"
    if by_logits and teacher.num_classes != model.num_classes:
        raise ValueError(
            f"teacher {teacher.name} has {teacher.num_classes} classes, the data {model.num_classes}; "
            "only --distill features works across classes"
        )
    seed_weights(config.seed, 1)  # for the projection from the student's map to the teacher's
    return DistillationTask(
        model,
        None if config.photos else criterion,
        by_logits,
        teacher.map_channels if config.distill != "logits" else None,
        config.distill_weight,
        config.distill_temperature,
        device,
    )


def build_optimizer(config: TrainConfig, module: nn.Module) -> torch.optim.Optimizer:
    """The optimizer over the parameters of `module`; timm drops options that the optimizer does not have."""
    # timm's Muon orthogonalizes in bfloat16, which most CPUs only emulate: a step then takes several times as long
    on_cpu = all(parameter.device.type == "cpu" for parameter in module.parameters())
    emulated = on_cpu and config.precision != "bf16"
    muon.zeropower_via_newtonschulz = partial(_newton_schulz, dtype=torch.float32) if emulated else _newton_schulz
    # torch's fused AdamW makes one pass over the weights instead of a dozen, on CPUs too
    fused = {"fused": True} if config.opt == "adamw" else {}
    try:
        return create_optimizer_v2(
            module,
            opt=config.opt,
            lr=config.lr,
            weight_decay=config.weight_decay,
            momentum=config.momentum,
            layer_decay=config.layer_decay,
            betas=config.betas,
            eps=config.opt_eps,
            **fused,
        )
    except (ValueError, TypeError) as error:
        raise ValueError(f"optimizer {config.opt}: {error}") from error


def build_scheduler(config: TrainConfig, optimizer: torch.optim.Optimizer, steps: int) -> Scheduler:
    """The learning rate as a function of the number of updates, with `steps` updates per epoch."""
    scheduler, _ = create_scheduler_v2(
        optimizer,
        sched=config.sched,
        num_epochs=config.epochs,
        warmup_epochs=config.warmup_epochs,
        warmup_lr=config.warmup_lr,
        min_lr=config.min_lr,
        step_on_epochs=False,
        updates_per_epoch=steps,
    )
    return scheduler
