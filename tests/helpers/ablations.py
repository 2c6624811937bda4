"""Models with every variant of the mixer."""

import pytest
import timm
import torch
from saved_models import SMALL

ABLATIONS = {
    "full": {},
    "no input gate": {"input_gate": False},
    "bound only": {"forget_gate": "bound_only"},
    "no forget gate": {"forget_gate": "none", "lower_bound": "none"},
    "no lower bound": {"lower_bound": "none"},
    "decreasing bounds": {"lower_bound": "decreasing"},
    "one direction": {"bidirectional": False},
    "real state": {"complex_state": False},
    "rotation by token": {"data_dependent_theta": True},
    "gate after norm": {"gate_after_norm": True},
    "rows and columns": {"scan": "2d"},
    "rows and columns, one direction": {"scan": "2d", "bidirectional": False, "local_conv": 3},
    "rows and columns, rotation by token": {"scan": "2d", "data_dependent_theta": True},
}


ablations = pytest.mark.parametrize("ablation", ABLATIONS.values(), ids=ABLATIONS)


def random_model(**arguments):
    """A model in which every parameter differs from its initial value."""
    model = timm.create_model("hgrn_deit_tiny", num_classes=3, **SMALL, **arguments).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model
