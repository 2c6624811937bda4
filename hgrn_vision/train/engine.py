"""One optimizer step, and everything that has to be in a checkpoint."""

import math
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from timm.utils import ModelEmaV3
from torch import nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from ..data.batches import MicroBatch
from ..data.spec import DataSpec
from ..data.transforms import BatchTransform, resize
from ..randomness import fold, seed_all
from .answers import KeptAnswers
from .build import autocast, build_optimizer, build_scheduler, build_task, precision
from .checkpoint import Checkpoint
from .config import TrainConfig, sides_by_epoch
from .distributed import World
from .faults import memory_advice
from .teachers import Answer, Teacher

# options of an optimizer that come from the settings, not from the checkpoint
FROM_SETTINGS = ("lr", "initial_lr", "lr_scale", "weight_decay", "betas", "eps", "momentum")


@dataclass
class Progress:
    """Where a run is, which with the seed determines order, augmentation, mixup and drop path; and its log."""

    epoch: int = 0
    step: int = 0  # in the epoch
    updates: int = 0  # optimizer steps since the beginning, skipped ones included
    skipped: int = 0  # of these, skipped because of a non-finite loss or gradient
    streak: int = 0  # skipped steps in a row, up to now
    rollbacks: int = 0
    loss_sum: float = 0.0  # over this epoch's steps that were not skipped
    loss_count: int = 0
    seconds: float = 0.0  # spent on this epoch's steps
    waited: float = 0.0  # of these seconds, waiting for data
    history: list[dict[str, Any]] = field(default_factory=list)  # the rows of log.csv
    best: dict[str, Any] | None = None  # the row of the best epoch

    def next_epoch(self) -> None:
        """Go to the beginning of the next epoch."""
        self.epoch += 1
        self._begin_epoch()

    def repeat_epoch(self) -> None:
        """Go back to the beginning of this epoch."""
        self.updates -= self.step
        self._begin_epoch()

    def _begin_epoch(self) -> None:
        self.step = self.loss_count = 0
        self.loss_sum = self.seconds = self.waited = 0.0


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step did; `loss` is the mean over the global batch."""

    loss: float
    applied: bool
    bad: bool  # skipped because of a non-finite loss or gradient; overflows that the fp16 scaler can fix do not count


class Engine:
    """Model, averaged model, loss, optimizer and schedule of a run, on one rank."""

    def __init__(
        self,
        config: TrainConfig,
        world: World,
        model: nn.Module,
        spec: DataSpec,
        steps: int,
        teacher: Teacher | None = None,
        answers: KeptAnswers | None = None,
    ) -> None:
        self.config, self.world, self.spec, self.teacher, self.answers = config, world, spec, teacher, answers
        self.first_sides = sides_by_epoch(config)
        self.model = model.to(world.device)
        self.progress = Progress()
        self.transform = BatchTransform(config, spec, model.num_classes)
        self.scaler = torch.amp.GradScaler(world.device.type, enabled=precision(config, world.device) == "fp16")
        # the average warms up; otherwise the random initial weights would dominate it throughout a short run
        self.ema = ModelEmaV3(self.model, config.ema, use_warmup=True, warmup_power=0.75) if config.ema else None
        self.task = build_task(config, self.model, world.device, teacher)
        trainable = self.task.trainable_module
        self.projection = getattr(trainable, "projection", None)  # of distillation by features
        self.parameters = [p for p in trainable.parameters() if p.requires_grad]
        self.optimizer = build_optimizer(config, trainable)
        self.scheduler = build_scheduler(config, self.optimizer, steps)
        if config.compile:
            trainable.compile()
        if world.size > 1:
            device_ids = [world.device.index] if world.device.type == "cuda" else None
            self.task.prepare_distributed(device_ids=device_ids, gradient_as_bucket_view=True)

    @property
    def eval_model(self) -> nn.Module:
        """The model that is evaluated and exported: the averaged one if there is one."""
        return self.ema.module if self.ema else self.model

    @property
    def lr(self) -> float:
        """The highest learning rate, that of the head: layer decay does not reduce it."""
        return max(group["lr"] for group in self.optimizer.param_groups)

    def step(self, batches: list[MicroBatch]) -> StepResult:
        """Accumulate the gradients of this rank's micro-batches, agree with the other ranks, and update the weights."""
        self.task.trainable_module.train()
        self.scheduler.step_update(self.progress.updates)
        with memory_advice(self.config, self.world.size):
            losses = [self._backward(batch, len(batches), last=batch is batches[-1]) for batch in batches]
            self.scaler.unscale_(self.optimizer)
            norm = get_total_norm([p.grad for p in self.parameters if p.grad is not None])
        result = self._agree(torch.stack(losses).sum().item(), norm)
        if result.applied and self.config.clip_grad:
            clip_grads_with_norm_(self.parameters, self.config.clip_grad, norm)
        if not result.bad:
            # with fp16, the scaler skips the update by itself if gradients overflowed
            self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        if result.applied and self.ema:
            self.ema.update(self.model, step=self.progress.updates + 1)
        self._count(result)
        return result

    def _backward(self, batch: MicroBatch, count: int, last: bool) -> torch.Tensor:
        progress, device = self.progress, self.world.device
        seed_all(fold(self.config.seed, progress.rollbacks, progress.epoch, progress.step, batch.number), device)
        images, targets = (tensor.to(device, non_blocking=True) for tensor in (batch.images, batch.targets))
        images, targets = self.transform.train(images, targets)
        if self.config.channels_last:
            images = images.contiguous(memory_format=torch.channels_last)
        # ranks exchange gradients once per step, with the last micro-batch
        with nullcontext() if last else self.task.no_sync():
            with autocast(self.config, device):
                loss = self._loss(images, targets, batch.views) / count
            self.scaler.scale(loss).backward()
        return loss.detach()

    def _loss(self, images: torch.Tensor, targets: torch.Tensor, views: torch.Tensor | None) -> torch.Tensor:
        """The loss on images of any size; student and teacher each see them at the size they need."""
        epoch = self.progress.epoch
        height, width = self.spec.input_size[-2:]
        if epoch < len(self.first_sides):
            height = width = self.first_sides[epoch]
        answer = (self._ask(images, views),) if self.teacher else ()
        return self.task(resize(images, (height, width)), targets, *answer)["loss"]

    def _ask(self, images: torch.Tensor, views: torch.Tensor | None) -> Answer:
        """The teacher's answer to images, looked up if it was kept."""
        if self.answers is None:
            return self.teacher(images, self.spec)
        return Answer(self.answers.logits_of(self.teacher, images, self.spec, views), None)

    def _agree(self, loss: float, norm: torch.Tensor) -> StepResult:
        """Decide whether the step counts, with the same result on every rank."""
        loss_bad = not math.isfinite(loss)
        norm_bad = not math.isfinite(norm.item())
        total, loss_bad, norm_bad = self.world.sum([0.0 if loss_bad else loss, loss_bad, norm_bad])
        # scaled gradients can overflow even if the loss is finite; lowering the scale helps as long as it is above 1
        curable = self.scaler.is_enabled() and not loss_bad and self.scaler.get_scale() > 1
        applied = not (loss_bad or norm_bad)
        return StepResult(total / self.world.size, applied, bad=not applied and not curable)

    def _count(self, result: StepResult) -> None:
        progress = self.progress
        progress.step += 1
        progress.updates += 1
        progress.skipped += result.bad
        progress.streak = progress.streak + 1 if result.bad else 0
        if result.applied:
            progress.loss_sum += result.loss
            progress.loss_count += 1

    def checkpoint(self) -> Checkpoint:
        """The engine's part of a checkpoint; the schedule is not in it, as it follows from the number of updates."""
        return Checkpoint(
            model=self.model.state_dict(),
            ema=self.ema.module.state_dict() if self.ema else None,
            projection=self.projection.state_dict() if self.projection else None,
            optimizer=self.optimizer.state_dict(),
            scaler=self.scaler.state_dict(),
            progress=asdict(self.progress),
        )

    def restore(self, checkpoint: Checkpoint) -> None:
        """Continue from the state in a checkpoint."""
        self.model.load_state_dict(checkpoint.model)
        if self.ema:
            # a run without averaged weights so far starts averaging from its current ones
            self.ema.module.load_state_dict(checkpoint.weights())
        if self.projection and checkpoint.projection:
            self.projection.load_state_dict(checkpoint.projection)
        ours = [{key: group[key] for key in FROM_SETTINGS if key in group} for group in self.optimizer.param_groups]
        self.optimizer.load_state_dict(checkpoint.optimizer)
        for group, options in zip(self.optimizer.param_groups, ours, strict=True):
            group.update(options)
        if self.scaler.is_enabled() and checkpoint.scaler:
            self.scaler.load_state_dict(checkpoint.scaler)
        self.progress = Progress(**checkpoint.progress)
