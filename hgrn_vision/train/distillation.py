"""What a student learns from a teacher: its logits, its feature maps, or both; with labels or without."""

from typing import Any

import torch
from timm.task.distillation import FeatureDistillationTrainableModule
from timm.task.task import TrainingTask
from torch import nn
from torch.nn.functional import adaptive_avg_pool2d, kl_div, layer_norm, log_softmax, mse_loss
from torch.nn.parallel import DistributedDataParallel

from .teachers import Answer


class DistillationTask(TrainingTask):
    """The loss of a student on a batch, given the teacher's answer to it.

    Args:
        student: the model that learns.
        criterion: the label loss; None if there are no labels.
        by_logits: whether to learn the teacher's logits.
        map_channels: channels of the teacher's feature map; None not to learn it.
        weight: of the distillation loss relative to the label loss; without labels it has no effect.
        temperature: softmax temperature for the logits of both.
        device: where the student is.
    """

    def __init__(
        self,
        student: nn.Module,
        criterion: nn.Module | None,
        by_logits: bool,
        map_channels: int | None,
        weight: float,
        temperature: float,
        device: torch.device,
    ) -> None:
        super().__init__(device=device, verbose=False)
        self.criterion, self.by_logits, self.by_maps = criterion, by_logits, map_channels is not None
        self.weight, self.temperature = weight, temperature
        self.trainable_module = student
        if self.by_maps:
            projection = nn.Conv2d(student.feature_info[-1]["num_chs"], map_channels, 1, device=device)
            self.trainable_module = StudentWithMap(student, projection)

    def prepare_distributed(self, device_ids: list | None = None, **ddp_kwargs: Any) -> "DistillationTask":
        self.trainable_module = DistributedDataParallel(self.trainable_module, device_ids=device_ids, **ddp_kwargs)
        return self

    def forward(self, input: torch.Tensor, target: torch.Tensor, answer: Answer) -> dict[str, torch.Tensor]:
        """The loss for images (B, C, H, W) at the student's size and targets (B, classes)."""
        logits, ours = self.trainable_module(input) if self.by_maps else (self.trainable_module(input), None)
        loss = logits.new_zeros(())
        if self.by_logits:
            loss = loss + logit_loss(logits, answer.logits, self.temperature)
        if self.by_maps:
            loss = loss + map_loss(ours, answer.map)
        if self.criterion is not None:
            loss = self.criterion(logits, target) + self.weight * loss
        return {"loss": loss, "output": logits}


class StudentWithMap(FeatureDistillationTrainableModule):
    """A student that returns its logits and its last feature map, projected to the teacher's channels."""

    def forward(self, input: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        features, maps = self.student.forward_intermediates(input, indices=1)
        return self.student.forward_head(features), self.projection(maps[-1])


def logit_loss(ours: torch.Tensor, theirs: torch.Tensor, temperature: float) -> torch.Tensor:
    """Kullback-Leibler divergence of softened probabilities; the squared temperature keeps gradients in scale."""
    ours, theirs = (log_softmax(logits.float() / temperature, dim=-1) for logits in (ours, theirs))
    return kl_div(ours, theirs, log_target=True, reduction="batchmean") * temperature**2


def map_loss(ours: torch.Tensor, theirs: torch.Tensor) -> torch.Tensor:
    """Mean squared difference of two maps (B, C, H, W) on the coarser grid; `theirs` is normalised at each position."""
    size = [min(sides) for sides in zip(ours.shape[-2:], theirs.shape[-2:], strict=True)]
    ours, theirs = (adaptive_avg_pool2d(each.float(), size).flatten(2).transpose(1, 2) for each in (ours, theirs))
    return mse_loss(ours, layer_norm(theirs, theirs.shape[-1:]))
