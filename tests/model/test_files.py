"""Atomic writes: the permissions of the files, and what is left after an error."""

import errno
import os
import stat

import pytest
import torch
from training import digits

from hgrn_vision.files import check_writable, whole_file, whole_folder, write_text
from hgrn_vision.train.build import build_model
from hgrn_vision.train.checkpoint import Checkpoint, Checkpoints
from hgrn_vision.train.run_folder import export_model


@pytest.fixture(params=[0o022, 0o027, 0o077], ids=oct)
def umask(request):
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


def test_the_umask_decides_who_may_read(tmp_path, umask):
    write_text(tmp_path / "a" / "file.txt", "é")
    assert (tmp_path / "a" / "file.txt").read_bytes() == "é".encode()
    assert mode(tmp_path / "a" / "file.txt") == 0o666 & ~umask
    with whole_file(tmp_path / "private") as temporary:
        temporary.unlink()
        temporary.touch(0o600)
    assert mode(tmp_path / "private") == 0o666 & ~umask


def test_checkpoints_can_be_shared_as_far_as_the_umask_allows(tmp_path, umask):
    folder = Checkpoints(tmp_path)
    for _ in range(2):
        folder.save(Checkpoint({"weight": torch.ones(3)}), best=True)
    assert {path.name: mode(path) for path in tmp_path.iterdir()} == {
        f"{name}.safetensors": 0o666 & ~umask for name in ("last", "previous", "best")
    }


def test_the_model_folder_can_be_shared_too(tmp_path, umask):
    config = digits()
    export_model(tmp_path / "model", build_model(config, 2), config, ["a", "b"])
    files = {path.name: mode(path) for path in (tmp_path / "model").iterdir()}
    assert {"config.json", "model.safetensors"} <= set(files) and set(files.values()) == {0o666 & ~umask}


def test_an_error_leaves_the_old_file_and_nothing_else(tmp_path):
    path = tmp_path / "file.txt"
    write_text(path, "old")
    with pytest.raises(KeyboardInterrupt), whole_file(path) as temporary:
        temporary.write_text("half of the ne")
        raise KeyboardInterrupt
    assert path.read_text() == "old" and os.listdir(tmp_path) == ["file.txt"]


def test_a_folder_has_its_name_when_all_of_it_is_there(tmp_path):
    folder = tmp_path / "new" / "folder"
    with pytest.raises(KeyboardInterrupt), whole_folder(folder) as temporary:
        (temporary / "a.txt").touch()
        assert os.listdir(folder.parent) == [temporary.name] != ["folder"]
        raise KeyboardInterrupt
    assert os.listdir(folder.parent) == []
    # an empty folder of that name may already exist
    folder.mkdir()
    with whole_folder(folder) as temporary:
        (temporary / "b.txt").touch()
    assert os.listdir(folder.parent) == ["folder"] and os.listdir(folder) == ["b.txt"]
    with pytest.raises(OSError, match=f"Errno {errno.ENOTEMPTY}"), whole_folder(folder) as temporary:
        (temporary / "c.txt").touch()
    assert os.listdir(folder.parent) == ["folder"] and os.listdir(folder) == ["b.txt"]


def test_a_file_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    events = []
    sync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda handle: (events.append("sync"), sync(handle)))
    monkeypatch.setattr(os, "replace", lambda source, target: (events.append("rename"), replace(source, target)))
    write_text(tmp_path / "file.txt", "text")
    assert events == ["sync", "rename", "sync"]


def test_what_a_killed_process_left_is_not_in_the_way(tmp_path):
    leftover = tmp_path / f"file.txt.{os.getpid()}.tmp"
    leftover.write_text("a process with this number was killed here")
    leftover.chmod(0o400)
    write_text(tmp_path / "file.txt", "text")
    assert os.listdir(tmp_path) == ["file.txt"] and (tmp_path / "file.txt").read_text() == "text"


def test_a_folder_that_a_killed_process_left_is_not_in_the_way(tmp_path):
    """In a container, a command that is started again often has the number of the one before."""
    leftover = tmp_path / f"folder.{os.getpid()}.tmp"
    leftover.mkdir()
    (leftover / "half.txt").touch()
    with whole_folder(tmp_path / "folder") as temporary:
        (temporary / "whole.txt").touch()
    assert os.listdir(tmp_path) == ["folder"] and os.listdir(tmp_path / "folder") == ["whole.txt"]


def test_two_processes_do_not_write_into_the_same_file(tmp_path, monkeypatch):
    path = tmp_path / "file.txt"
    with whole_file(path) as ours:
        ours.write_text("ours")
        with monkeypatch.context() as patch:
            patch.setattr(os, "getpid", lambda: 1)
            write_text(path, "theirs")
        assert ours.read_text() == "ours" and path.read_text() == "theirs"
    assert path.read_text() == "ours"


def test_a_folder_that_cannot_be_written_is_refused_beforehand(tmp_path, monkeypatch):
    file = tmp_path / "file"
    file.touch()
    for folder in (file, file / "a" / "b"):
        with pytest.raises(ValueError, match=f"{file} is not a folder; choose another output folder"):
            check_writable(folder)
    monkeypatch.chdir(tmp_path)
    for folder in (tmp_path, tmp_path / "a" / "b", "a/b", ".", "../c"):
        check_writable(folder)
    assert list(tmp_path.iterdir()) == [file]
    monkeypatch.setattr(os, "access", lambda path, mode: (str(path), mode) != (str(tmp_path), os.W_OK | os.X_OK))
    with pytest.raises(ValueError, match=f"cannot write to {tmp_path}; choose another output folder"):
        check_writable(tmp_path / "a")
