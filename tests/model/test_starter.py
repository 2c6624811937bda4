"""The weights in the package, whatever their values: complete, small, and usable by name."""

import socket
from pathlib import Path

import pytest
import timm
import torch
from safetensors.torch import load_file
from saved_models import write_image

import hgrn_vision  # noqa: F401
from hgrn_vision.cli import main
from hgrn_vision.packaged import PRETRAINED, STARTER, check_packaged, weights_file


def test_the_file_is_complete_and_small():
    path = Path(weights_file(STARTER))
    check_packaged(path)
    assert sorted(each.name for each in PRETRAINED.iterdir()) == ["SHA256SUMS", path.name]
    assert path.stat().st_size < 13e6
    tensors = load_file(path)
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float16}
    assert all(torch.isfinite(tensor).all() for tensor in tensors.values())


@pytest.mark.parametrize(
    "options", [{}, {"num_classes": 5}, {"in_chans": 1}, {"patch_size": 16}, {"features_only": True}], ids=str
)
def test_loaded_without_a_network(options, monkeypatch):
    def refuse(*args):
        raise AssertionError("the network was asked")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    model = timm.create_model("hgrn_deit_tiny", pretrained=True, **options).eval()
    with torch.no_grad():
        outputs = model(torch.randn(1, options.get("in_chans", 3), 112, 112))
    assert all(torch.isfinite(output).all() for output in outputs)
    blocks = getattr(model, "model", model).blocks
    assert torch.equal(blocks[0].mlp.fc1.weight, load_file(weights_file(STARTER))["blocks.0.mlp.fc1.weight"].float())


def test_the_commands_take_its_name(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    photo = str(write_image(tmp_path / "photos" / "golden retriever" / "1.png", 0, (160, 120)))
    assert main(["predict", "hgrn_deit_tiny", photo]) == 0
    assert main(["evaluate", "hgrn_deit_tiny", "photos"]) == 0
    assert main(["explain", "hgrn_deit_tiny", photo, "--steps", "2", "--layers", "1", "--output", "explained"]) == 0
    assert main(["export", "hgrn_deit_tiny", "--format", "torchscript"]) == 0
    text = capsys.readouterr().out
    assert "golden retriever" in text and "wrote hgrn_deit_tiny.torchscript" in text
    assert (tmp_path / "explained" / "index.html").is_file()
