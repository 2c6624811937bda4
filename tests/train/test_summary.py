"""What the report of a run is made of."""

import numpy as np
import torch
from training import Setup, digits

from hgrn_vision.data.transforms import eval_transform, normalise
from hgrn_vision.train.summary import GATE_IMAGES, measure_gates


def test_the_gates_are_those_of_images_from_the_whole_split():
    setup = Setup(digits())
    model = setup.engine.model.eval()
    layers = measure_gates(model, setup.validation, setup.spec, setup.engine.transform)
    rows = np.linspace(0, len(setup.validation) - 1, GATE_IMAGES).astype(int)
    images = torch.stack([eval_transform(setup.spec)(setup.validation.load(int(row))) for row in rows])
    with torch.no_grad():
        gates = model.forget_gates(normalise(images, setup.spec))
    assert len(layers) == len(gates)
    for layer, values in zip(layers, gates, strict=True):
        values = values.double().numpy()
        np.testing.assert_allclose([layer.mean, layer.median], [values.mean(), np.median(values)], atol=1e-5)
        counts = np.histogram(values, len(layer.shares), (0, 1))[0]
        np.testing.assert_allclose(layer.shares, counts / values.size, atol=1e-3)


def test_models_without_gates_and_images_that_cannot_be_read_have_none(monkeypatch):
    setup = Setup(digits())
    assert measure_gates(torch.nn.Linear(2, 2), setup.validation, setup.spec, setup.engine.transform) == []
    unreadable = setup.validation.subset(np.array([], dtype=int))
    assert measure_gates(setup.engine.model, unreadable, setup.spec, setup.engine.transform) == []
