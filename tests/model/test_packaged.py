"""Weights that come with the package: written, checked before they are read, and loaded by timm in every form."""

import hashlib
import shutil
import socket
import subprocess

import pytest
import timm
import torch
from safetensors.torch import load_file
from saved_models import SMALL, package_starter, small_model
from timm.layers import resample_patch_embed

from hgrn_vision import packaged
from hgrn_vision.packaged import STARTER, SUMS, check_packaged, write_starter


@pytest.fixture(scope="module")
def starter(tmp_path_factory):
    """A folder with weights, and the model they belong to."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("pretrained")
        yield folder, package_starter(folder, patch)


@pytest.fixture
def offline(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("the network was asked")

    monkeypatch.setattr(socket.socket, "connect", refuse)


def halves(model):
    return {name: tensor.half().float() for name, tensor in model.state_dict().items()}


def same(model, wanted):
    own = model.state_dict()
    return all(torch.equal(own[name], tensor) for name, tensor in wanted.items())


def test_what_is_written(tmp_path):
    model = small_model()
    (tmp_path / SUMS).write_text(f"{'0' * 64}  other.safetensors\n")
    path = write_starter(model, tmp_path, "small.test")
    assert path == tmp_path / "small.test.safetensors"
    tensors = load_file(path)
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float16}
    assert all(torch.equal(tensors[name].float(), tensor) for name, tensor in halves(model).items())
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    assert (tmp_path / SUMS).read_text() == f"{'0' * 64}  other.safetensors\n{digest}  small.test.safetensors\n"
    write_starter(small_model(seed=1), tmp_path, "small.test")
    assert len((tmp_path / SUMS).read_text().splitlines()) == 2 and digest not in (tmp_path / SUMS).read_text()


def test_whole_numbers_stay_whole_numbers(tmp_path):
    norm = torch.nn.BatchNorm2d(2)
    norm.num_batches_tracked += 2**40 + 1
    tensors = load_file(write_starter(norm, tmp_path))
    assert tensors["num_batches_tracked"].item() == 2**40 + 1 and tensors["weight"].dtype == torch.float16


def test_a_list_of_binary_files_is_read_too(tmp_path, monkeypatch):
    """As `sha256sum --binary` writes it."""
    path = write_starter(torch.nn.Linear(2, 2), tmp_path, "a.b")
    monkeypatch.setattr(packaged, "PRETRAINED", tmp_path)
    (tmp_path / SUMS).write_text((tmp_path / SUMS).read_text().replace("  a.b", " *a.b"))
    check_packaged(path)
    (tmp_path / SUMS).write_text((tmp_path / SUMS).read_text().replace("a.b", "b.b"))
    with pytest.raises(ValueError, match="a.b.safetensors is damaged"):
        check_packaged(path)


@pytest.mark.skipif(not shutil.which("sha256sum"), reason="there is no sha256sum")
def test_sha256sum_takes_the_list(starter):
    folder, _ = starter
    assert subprocess.run(["sha256sum", "--check", "--strict", "--quiet", SUMS], cwd=folder).returncode == 0


def test_a_number_too_large_for_float16_is_refused(tmp_path):
    model = small_model()
    with torch.no_grad():
        model.blocks[1].mlp.fc1.weight[0, 0] = 1e5
    with pytest.raises(ValueError, match="blocks.1.mlp.fc1.weight has values that float16 cannot hold"):
        write_starter(model, tmp_path)
    assert not list(tmp_path.iterdir())


def test_the_file_is_small_enough_for_a_package(starter):
    folder, _ = starter
    assert (folder / f"{STARTER}.safetensors").stat().st_size < 13e6


@pytest.mark.parametrize("name", ["hgrn_deit_tiny", STARTER])
def test_loaded_without_a_network(name, starter, offline):
    model = timm.create_model(name, pretrained=True)
    assert same(model, halves(starter[1])) and next(model.parameters()).dtype == torch.float32
    assert model.pretrained_cfg["tag"] == "dist_photos"


def test_another_number_of_classes(starter):
    model = timm.create_model("hgrn_deit_tiny", pretrained=True, num_classes=5)
    assert model.head.weight.shape == (5, 192)
    assert same(model, {name: t for name, t in halves(starter[1]).items() if not name.startswith("head.")})


def test_feature_maps(starter):
    model = timm.create_model("hgrn_deit_tiny", pretrained=True, features_only=True, out_indices=(3, 7)).eval()
    with torch.no_grad():
        maps = model(torch.randn(1, 3, 56, 56))
    assert [tuple(each.shape) for each in maps] == [(1, 192, 4, 4)] * 2
    own = model.model.state_dict()
    assert all(torch.equal(own[name], tensor) for name, tensor in halves(starter[1]).items() if name in own)
    assert "blocks.7.mlp.fc2.weight" in own


def test_grey_images_and_other_patches(starter):
    weights = halves(starter[1])
    projection = weights.pop("patch_embed.proj.weight")
    grey = timm.create_model("hgrn_deit_tiny", pretrained=True, in_chans=1)
    assert same(grey, weights)
    torch.testing.assert_close(grey.patch_embed.proj.weight, projection.sum(1, keepdim=True), rtol=1e-3, atol=1e-4)
    finer = timm.create_model("hgrn_deit_tiny", pretrained=True, patch_size=8)
    assert same(finer, weights)
    resampled = resample_patch_embed(projection, [8, 8])
    torch.testing.assert_close(finer.patch_embed.proj.weight, resampled, rtol=1e-3, atol=1e-3)


def flip_a_bit(folder):
    path = folder / f"{STARTER}.safetensors"
    content = bytearray(path.read_bytes())
    content[-1000] ^= 1
    path.write_bytes(content)


def cut_short(folder):
    path = folder / f"{STARTER}.safetensors"
    path.write_bytes(path.read_bytes()[:5_000_000])


DAMAGE = {
    "flipped": (flip_a_bit, "is damaged: its SHA-256 is not the one in SHA256SUMS"),
    "cut": (cut_short, "is damaged"),
    "no list": (lambda folder: (folder / SUMS).unlink(), "is damaged"),
    "gone": (lambda folder: (folder / f"{STARTER}.safetensors").unlink(), "is missing"),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_a_damaged_file_is_not_read(case, tmp_path, monkeypatch):
    package_starter(tmp_path, monkeypatch)
    damage, message = DAMAGE[case]
    damage(tmp_path)
    monkeypatch.setattr("timm.models._builder.load_state_dict", lambda *_: pytest.fail("it was read"))
    with pytest.raises(ValueError, match=f"{message}.*; reinstall the package") as error:
        timm.create_model("hgrn_deit_tiny", pretrained=True)
    assert str(tmp_path / STARTER) in str(error.value) and "\n" not in str(error.value)


def test_other_sources_are_timms_business(tmp_path, monkeypatch):
    package_starter(tmp_path, monkeypatch)
    flip_a_bit(tmp_path)
    small = {**SMALL, "num_classes": 3}
    path = write_starter(small_model(), tmp_path / "other")
    (tmp_path / "other" / SUMS).unlink()
    for overlay in ({"file": str(path)}, {"state_dict": small_model().state_dict()}):
        overlay["num_classes"] = 3
        model = timm.create_model("hgrn_deit_tiny", pretrained=True, pretrained_cfg_overlay=overlay, **small)
        assert torch.allclose(model.head.weight, small_model().head.weight, atol=1e-3)


def test_new_weights_are_not_described_as_the_packaged_ones():
    model = timm.create_model("hgrn_deit_tiny")
    assert model.pretrained_cfg["tag"] == "untrained" and not model.pretrained_cfg.get("file")
    assert timm.data.resolve_data_config(model=model)["input_size"] == (3, 224, 224)
    assert timm.get_pretrained_cfg("hgrn_deit_tiny").file == str(packaged.PRETRAINED / f"{STARTER}.safetensors")


def test_only_the_starter_has_weights():
    assert timm.list_models(module="hgrn", pretrained=True) == [STARTER]
