"""What a model does with an image: numbers against independent ones, the map against a digit that moves."""

import itertools

import numpy as np
import pytest
import timm
import torch
from ablations import ablations, random_model
from saved_models import SMALL, small_model

from hgrn_vision.data.digits import load_digits
from hgrn_vision.inference.interpret import evidence, mixing_matrix, mixing_strength


@ablations
def test_mixing_matrix_times_c_is_the_state(ablation):
    model = random_model(**ablation)
    images = torch.randn(2, 3, 16, 16)
    normed, projected = {}, {}
    for i, block in enumerate(model.blocks):
        block.mixer.norm.register_forward_pre_hook(lambda module, args, i=i: normed.update({i: args[0]}))
        block.mixer.in_proj.register_forward_hook(lambda module, args, out, i=i: projected.update({i: out}))
    with torch.no_grad():
        model(images)
        recurrences = list(model.recurrences(images))
        for i, recurrence in enumerate(recurrences):
            state = normed[i]  # gated, except in the variant whose gate follows the norm
            gate = (
                projected[i][..., -2 * model.embed_dim :] + model.blocks[i].mixer.in_proj.bias[-2 * model.embed_dim :]
            )
            for image in range(2):
                matrix = mixing_matrix(recurrence, image)
                c = torch.complex(*recurrence.c[image].double().unbind(1))  # (T, D)
                h = torch.einsum("dts,sd->td", matrix.to(c.dtype), c)
                got = torch.cat([h.real, h.imag], dim=-1)
                if not model.blocks[i].mixer.gate_after_norm:
                    got = got * gate[image].double().sigmoid()
                torch.testing.assert_close(got.float(), state[image].float(), atol=1e-5, rtol=1e-5)
                # the diagonals of both directions add up, since nothing has rotated there yet
                strength = matrix.abs().mean(dim=0).float()
                torch.testing.assert_close(torch.from_numpy(mixing_strength(recurrence, image)), strength)
    if ablation.get("bidirectional") is False:
        assert np.triu(mixing_strength(recurrences[0]), 1).max() == 0


def scene(digit, row, column):
    """A digit on a dark, noisy background of 16x16 pixels, normalised."""
    image = 0.05 * torch.rand(1, 16, 16)
    image[:, row : row + 8, column : column + 8] += torch.from_numpy(digit / 16).float()
    return (image.clamp(0, 1).expand(3, -1, -1) - 0.5) / 0.5


@pytest.fixture(scope="module")
def digits_model():
    """A small model that has learned digits anywhere in the image."""
    torch.manual_seed(0)
    digits, labels = load_digits()
    places = torch.Generator().manual_seed(0)
    model = timm.create_model("hgrn_deit_tiny", num_classes=10, **SMALL)
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-3)
    steps = 120
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 8e-3, total_steps=steps)
    for _ in range(steps):
        chosen = torch.randint(0, 1500, (64,), generator=places).tolist()
        corners = (4 * torch.randint(0, 3, (64, 2), generator=places)).tolist()
        images = torch.stack([scene(digits[i], *corner) for i, corner in zip(chosen, corners, strict=True)])
        loss = torch.nn.functional.cross_entropy(model(images), torch.from_numpy(labels[chosen]))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return model.eval()


def test_strongest_cell_follows_the_digit(digits_model):
    digits, _ = load_digits()
    for number, row, column in itertools.product(range(1500, 1504), (0, 4, 8), (0, 4, 8)):
        image = scene(digits[number], row, column)
        answer = int(digits_model(image[None]).argmax())
        found = evidence(digits_model, image, answer, steps=32)
        assert found.cells.shape == (4, 4)
        y, x = np.unravel_index(found.cells.argmax(), found.cells.shape)
        where = f"digit {number} at {row}, {column}: strongest cell {y}, {x}"
        assert row <= 4 * y < row + 8 and column <= 4 * x < column + 8, where


def test_evidence_adds_up_to_the_gain(digits_model):
    digits, _ = load_digits()
    image = scene(digits[1500], 4, 8)
    empty = image.flatten(1).median(dim=1).values.view(3, 1, 1).expand_as(image)
    with torch.no_grad():
        scores = digits_model(torch.stack([image, empty])).log_softmax(dim=-1)
    for target in range(3):
        found = evidence(digits_model, image, target, steps=256)
        gain = float(scores[0, target] - scores[1, target])
        assert found.gain == pytest.approx(gain, abs=1e-5)
        assert found.cells.sum() == pytest.approx(gain, abs=0.02)


def test_class_changes_the_evidence():
    model = small_model()
    image = torch.randn(3, 16, 16)
    maps = [evidence(model, image, target, steps=2).cells for target in range(3)]
    assert np.abs(maps[0] - maps[1]).max() > 1e-3


def test_one_step_is_the_gradient_half_way():
    model, image = small_model(), torch.randn(3, 16, 16)
    empty = image.flatten(1).median(dim=1).values.view(3, 1, 1).expand_as(image)
    middle = ((image + empty) / 2).requires_grad_()
    model(middle[None]).log_softmax(dim=-1)[0, 1].backward()
    cells = ((image - empty) * middle.grad).sum(0).unflatten(0, (4, 4)).unflatten(2, (4, 4)).sum((1, 3))
    torch.testing.assert_close(torch.from_numpy(evidence(model, image, 1, steps=1).cells), cells)


def test_patches_at_a_padded_border_are_cells_too():
    model, image = small_model(), torch.randn(3, 18, 21)
    found = evidence(model, image, 1, steps=64)
    assert found.cells.shape == (5, 6) and np.abs(found.cells[-1]).min() > 0 and np.abs(found.cells[:, -1]).min() > 0
    assert found.cells.sum() == pytest.approx(found.gain, abs=0.02)
