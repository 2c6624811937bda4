"""The losses of distillation against formulas written out in float64."""

import pytest
import torch
from torch import nn

from hgrn_vision.train import distillation
from hgrn_vision.train.distillation import DistillationTask, logit_loss, map_loss
from hgrn_vision.train.teachers import Answer


@pytest.mark.parametrize("temperature", [1.0, 2.5])
def test_logit_loss_and_its_gradient(temperature):
    ours, theirs = torch.randn(5, 7, requires_grad=True), 3 * torch.randn(5, 7)
    loss = logit_loss(ours, theirs, temperature)
    loss.backward()
    p, q = ((logits.detach().double() / temperature).softmax(-1) for logits in (theirs, ours))
    want = (p * (p.log() - q.log())).sum() / 5 * temperature**2
    torch.testing.assert_close(loss.double(), want, atol=1e-5, rtol=1e-5)
    # the gradient of a softmax's divergence is the difference of the probabilities
    torch.testing.assert_close(ours.grad.double(), (q - p) * temperature / 5, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("grid, own_grid", [((6, 6), (4, 4)), ((3, 5), (3, 5)), ((2, 2), (4, 6))])
def test_map_loss_compares_on_the_coarser_grid(grid, own_grid):
    ours, theirs = torch.randn(2, 8, *grid), 5 + 3 * torch.randn(2, 8, *own_grid)
    size = [min(pair) for pair in zip(grid, own_grid, strict=True)]
    small = [torch.nn.functional.adaptive_avg_pool2d(each.double(), size) for each in (ours, theirs)]
    target = (small[1] - small[1].mean(1, keepdim=True)) / (small[1].var(1, unbiased=False, keepdim=True) + 1e-5).sqrt()
    torch.testing.assert_close(
        map_loss(ours, theirs).double(), (small[0] - target).square().mean(), atol=1e-5, rtol=1e-5
    )


class Student(nn.Module):
    """The parts of a timm model that a task needs."""

    feature_info = [{"num_chs": 9}, {"num_chs": 4}]

    def __init__(self):
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, 4, 2, stride=2), nn.Linear(4, 3)

    def forward(self, images):
        return self.forward_head(self.stem(images))

    def forward_head(self, features):
        return self.head(features.mean((2, 3)))

    def forward_intermediates(self, images, indices):
        assert indices == 1
        features = self.stem(images)
        return features, [features]


@pytest.mark.parametrize("by_logits, by_maps", [(True, False), (False, True), (True, True)])
@pytest.mark.parametrize("labels", [True, False])
def test_what_is_asked_for_is_what_is_added_up(by_logits, by_maps, labels):
    student = Student()
    criterion = (lambda logits, target: (logits * target).sum()) if labels else None
    task = DistillationTask(student, criterion, by_logits, 6 if by_maps else None, 0.3, 2.0, torch.device("cpu"))
    images, target = torch.randn(2, 3, 8, 8), torch.randn(2, 3)
    answer = Answer(torch.randn(2, 3), torch.randn(2, 6, 2, 2) if by_maps else None)
    loss = task(images, target, answer)["loss"]
    want = 0.0
    if by_logits:
        want = want + logit_loss(student(images), answer.logits, 2.0)
    if by_maps:
        want = want + map_loss(task.trainable_module.projection(student.stem(images)), answer.map)
    if labels:
        want = criterion(student(images), target) + 0.3 * want
    torch.testing.assert_close(loss, want)
    loss.backward()
    assert all(parameter.grad is not None for parameter in student.stem.parameters())


@pytest.mark.parametrize("map_channels", [None, 6])
def test_ranks_share_the_gradients_of_all_that_is_trained(map_channels, monkeypatch):
    made, shared = [], nn.Identity()
    monkeypatch.setattr(
        distillation, "DistributedDataParallel", lambda module, **options: made.append((module, options)) or shared
    )
    task = DistillationTask(Student(), None, True, map_channels, 1.0, 1.0, torch.device("cpu"))
    trained = task.trainable_module
    assert task.prepare_distributed(device_ids=[3], gradient_as_bucket_view=True) is task
    assert made == [(trained, {"device_ids": [3], "gradient_as_bucket_view": True})]
    assert task.trainable_module is shared and hasattr(trained, "projection") == (map_channels is not None)
