"""Checkpoints: what goes in comes out, and damaged or foreign files are refused."""

import json
import logging
import os
import pickle

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from hgrn_vision.train.checkpoint import (
    Checkpoint,
    CheckpointError,
    Checkpoints,
    checksum,
    pack,
    read,
    unpack,
    write,
)


def contents(number: int) -> Checkpoint:
    return Checkpoint({"weight": torch.full((50, 50), float(number))}, progress={"updates": number, "best": None})


def test_round_trip_of_every_kind(tmp_path):
    weight = torch.randn(3, 4)
    values = {
        "model": {"a.weight": weight, "tied": weight, "view": weight.t(), "count": torch.tensor(7)},
        "ema": {"half": torch.randn(5).bfloat16(), "empty": torch.empty(0, 3)},
        "optimizer": {"state": {0: {"step": torch.tensor(3.0)}, 1: {}}, "param_groups": [{"betas": (0.9, 0.98)}]},
        "class_names": ["Füße"],
        "config": {"numbers": [1, 2.5, True, None, float("inf"), 0.1 + 0.2]},
        "train_images": 3,
    }
    write(tmp_path / "c.safetensors", Checkpoint(**values))
    got = read(tmp_path / "c.safetensors")
    assert got.optimizer["param_groups"] == values["optimizer"]["param_groups"]
    assert list(got.optimizer["state"]) == [0, 1]
    assert (got.config, got.class_names, got.train_images) == (values["config"], ["Füße"], 3)
    assert got.projection is None and got.progress == {}
    for part, tensors in ((got.model, values["model"]), (got.ema, values["ema"])):
        assert part.keys() == tensors.keys()
        for name, tensor in tensors.items():
            assert part[name].dtype == tensor.dtype and torch.equal(part[name], tensor), name
    assert os.listdir(tmp_path) == ["c.safetensors"]


def test_the_weights_to_use_are_the_averaged_ones():
    model, ema = {"w": torch.zeros(1)}, {"w": torch.ones(1)}
    assert Checkpoint(model, ema).weights() is ema
    assert Checkpoint(model).weights() is model


def rewrite(path, **changes):
    """Change the state in a checkpoint file and give it a matching checksum."""
    with safe_open(path, framework="pt") as file:
        metadata, tensors = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    contents = {**unpack(json.loads(metadata["state"]), tensors), **changes}
    packed: dict = {}
    state = json.dumps(pack({name: value for name, value in contents.items() if value != "absent"}, packed))
    save_file(packed, path, {"state": state, "checksum": checksum(packed, state)})


def test_what_a_checkpoint_holds_on_disk(tmp_path):
    """Files of earlier versions have these names, though some lack a few."""
    path = tmp_path / "c.safetensors"
    write(path, contents(3))
    with safe_open(path, framework="pt") as file:
        names = [name for name, _ in json.loads(file.metadata()["state"])["items"]]
    kept = "model ema projection optimizer scaler progress config class_names train_images about"
    assert names == kept.split()
    rewrite(path, projection="absent", about="absent")
    assert read(path).progress["updates"] == 3 and read(path).projection is None
    rewrite(path, gradient=[1.0])
    with pytest.raises(CheckpointError, match="of another version: it also holds gradient"):
        read(path)
    rewrite(path, gradient="absent", model="absent")
    with pytest.raises(CheckpointError, match="of another version: it holds no model"):
        read(path)


def cut(data: bytes) -> bytes:
    return data[: len(data) // 2]


def empty(data: bytes) -> bytes:
    return b""


def flip(place: float):
    def damage(data: bytes) -> bytes:
        at = int(place * (len(data) - 1))
        return data[:at] + bytes([data[at] ^ 16]) + data[at + 1 :]

    damage.__name__ = f"flip_at_{place}"
    return damage


def swap_for_pickle(data: bytes) -> bytes:
    return pickle.dumps(Trap())


class Trap:
    """What a malicious file would contain: code that runs when it is unpickled."""

    def __reduce__(self):
        return os.mkdir, ("the-trap-was-sprung",)


DAMAGES = [cut, empty, swap_for_pickle, *(flip(place) for place in (0.0, 0.001, 0.01, 0.02, 0.5, 1.0))]


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_damage_falls_back_on_the_previous(tmp_path, monkeypatch, caplog, damage):
    monkeypatch.chdir(tmp_path)
    folder = Checkpoints(tmp_path / "checkpoints")
    for number in (1, 2, 3):
        folder.save(contents(number))
    folder.last.write_bytes(damage(folder.last.read_bytes()))
    again = Checkpoints(tmp_path / "checkpoints")
    with caplog.at_level(logging.WARNING):
        assert again.load().progress["updates"] == 2
    assert "last.safetensors" in caplog.text
    assert not (tmp_path / "the-trap-was-sprung").exists()
    # the next save must replace the damaged file, not the good one that the run continued from
    again.save(contents(4))
    assert read(again.previous).progress["updates"] == 2
    assert read(again.last).progress["updates"] == 4


@pytest.mark.parametrize("damage", [cut, empty, flip(0.5), swap_for_pickle], ids=lambda damage: damage.__name__)
def test_both_damaged_refuses_and_changes_nothing(tmp_path, damage):
    folder = Checkpoints(tmp_path / "checkpoints")
    folder.save(contents(1))
    folder.save(contents(2))
    for path in (folder.last, folder.previous):
        path.write_bytes(damage(path.read_bytes()))
    before = {path: path.read_bytes() for path in folder.folder.iterdir()}
    with pytest.raises(CheckpointError, match="no usable checkpoint"):
        Checkpoints(tmp_path / "checkpoints").load()
    assert {path: path.read_bytes() for path in folder.folder.iterdir()} == before


def test_a_kill_between_the_renames_leaves_the_previous(tmp_path):
    folder = Checkpoints(tmp_path)
    folder.save(contents(1))
    os.replace(folder.last, folder.previous)
    (tmp_path / "next.safetensors.17.tmp").write_bytes(b"half a checkpoint")
    assert Checkpoints(tmp_path).load().progress["updates"] == 1


def test_a_new_run_has_no_checkpoint(tmp_path):
    assert Checkpoints(tmp_path / "nothing").load() is None
    assert Checkpoints(tmp_path / "nothing").load_best() is None


def test_other_safetensors_files_are_refused(tmp_path):
    save_file({"weight": torch.ones(3)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="not a checkpoint of a run"):
        read(tmp_path / "model.safetensors")


def test_the_best_outlives_later_saves(tmp_path):
    folder = Checkpoints(tmp_path)
    folder.save(contents(1), best=True)
    for number in (2, 3, 4):
        folder.save(contents(number))
    assert folder.load_best().progress["updates"] == 1
    folder.save(contents(5), best=True)
    assert folder.load_best().progress["updates"] == 5
    assert sorted(os.listdir(tmp_path)) == ["best.safetensors", "last.safetensors", "previous.safetensors"]


def test_where_files_cannot_be_linked_the_best_is_a_copy(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError("no links here")

    monkeypatch.setattr(os, "link", refuse)
    folder = Checkpoints(tmp_path)
    folder.save(contents(1), best=True)
    folder.save(contents(2))
    assert folder.load_best().progress["updates"] == 1


def test_what_was_written_wrongly_is_noticed(tmp_path, monkeypatch):
    """A disk that loses data without an error: the copy that is read back differs, and the last one stays."""
    from hgrn_vision.train import checkpoint

    folder = Checkpoints(tmp_path)
    folder.save(contents(1))

    def lossy(tensors, path, metadata):
        save_file(tensors, path, metadata)
        path.write_bytes(cut(path.read_bytes()))

    monkeypatch.setattr(checkpoint, "save_file", lossy)
    with pytest.raises(OSError, match="cannot write .*next.safetensors"):
        folder.save(contents(2))
    assert read(folder.last).progress["updates"] == 1
    assert os.listdir(tmp_path) == ["last.safetensors"]
