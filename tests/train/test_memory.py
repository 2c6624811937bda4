import ctypes
import math
import resource
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from hgrn_vision.commands import bench
from hgrn_vision.train import memory, run
from hgrn_vision.train.config import TrainConfig

STEPS = """
import resource, sys, torch
from hgrn_vision.commands import bench
from hgrn_vision.train.memory import keep_freed_memory
if sys.argv[1] == "keep" and not keep_freed_memory():
    sys.exit("no glibc")
step = lambda: torch.ones(2**24).add_(1)  # 64 MiB, above what glibc ever keeps by itself

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    step()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

print(min(faults() for _ in range(4)))
print(bench.peak_memory(step, torch.device("cpu")) / 2**20)
"""


def in_a_process(what):
    done = subprocess.run([sys.executable, "-c", STEPS, what], capture_output=True, text=True)
    if "no glibc" in done.stderr:
        pytest.skip("needs glibc")
    assert done.returncode == 0, done.stderr
    return [float(line) for line in done.stdout.split()]


@pytest.mark.machine
@pytest.mark.skipif(sys.platform != "linux", reason="needs glibc")
def test_pages_are_mapped_once_and_the_peak_is_still_seen():
    faults, peak = in_a_process("keep")
    plain_faults, plain_peak = in_a_process("give back")
    assert faults < 50 and plain_faults > 10 * max(faults, 1)
    assert peak == pytest.approx(64, rel=0.1) and plain_peak == pytest.approx(64, rel=0.1)


def test_malloc_is_told_to_keep_what_is_freed(monkeypatch):
    told = {}
    library = SimpleNamespace(mallopt=lambda name, value: told.update({name: value}) or 1)
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(ctypes, "CDLL", lambda name: library if name is None else pytest.fail("another library"))
    assert memory.keep_freed_memory() is True
    # M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of malloc.h: neither the end of the heap nor large blocks are returned
    assert told == {-1: 2**30, -3: 2**30}
    library.mallopt = lambda name, value: int(name != -3)
    assert memory.keep_freed_memory() is False, "malloc refused"


def test_harmless_without_glibc(monkeypatch):
    monkeypatch.setattr(ctypes, "CDLL", lambda name: object())
    assert not memory.keep_freed_memory()
    monkeypatch.setattr(ctypes, "CDLL", lambda name: pytest.fail("looked for glibc"))
    monkeypatch.setattr(sys, "platform", "darwin")
    assert not memory.keep_freed_memory()


class Stopped(Exception):
    pass


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_training_on_a_cpu_keeps_it(device, monkeypatch, tmp_path):
    def kept():
        raise Stopped("kept")

    def opened(*args):
        raise Stopped("opened")

    monkeypatch.setattr(run, "start", lambda config: SimpleNamespace(device=torch.device(device), main=True))
    monkeypatch.setattr(run, "keep_freed_memory", kept)
    monkeypatch.setattr(run.Run, "open", opened)
    with pytest.raises(Stopped, match="kept" if device == "cpu" else "opened"):
        run.train(TrainConfig(), tmp_path)


def test_the_peak_is_forgotten_after_freed_memory_is_given_back(monkeypatch):
    """In this order, or the peak would begin at what the last run has left."""
    events = []

    class FakePath(str):
        def write_text(self, text):
            events.append((str(self), text))

    library = SimpleNamespace(malloc_trim=lambda pad: events.append("trim"))
    monkeypatch.setattr(ctypes, "CDLL", lambda name: library)
    monkeypatch.setattr(memory, "Path", FakePath)
    memory.forget_peak(torch.device("cpu"))
    assert events == ["trim", ("/proc/self/clear_refs", "5")]
    # a system without them
    monkeypatch.setattr(ctypes, "CDLL", lambda name: object())
    memory.forget_peak(torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: events.append("empty"))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: events.append(device))
    memory.forget_peak(torch.device("cuda:1"))
    assert events[2:] == ["empty", torch.device("cuda:1")]


@pytest.mark.machine
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux")
def test_the_peak_begins_anew_for_each_run():
    device = torch.device("cpu")
    big = torch.ones(2**26)  # 256 MiB
    held = memory.peak_memory(device)
    del big
    memory.forget_peak(device)
    assert memory.peak_memory(device) < held - 200


@pytest.mark.parametrize("platform, unit", [("linux", 2**10), ("darwin", 2**20)])
def test_the_peak_is_in_mebibytes(platform, unit, monkeypatch):
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setattr(resource, "getrusage", lambda who: SimpleNamespace(ru_maxrss=300 * unit))
    assert memory.peak_memory(torch.device("cpu")) == 300
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 5 * 2**20)
    assert memory.peak_memory(torch.device("cuda")) == 5


def test_the_peak_of_a_step_is_counted_from_what_was_held_before_it(monkeypatch):
    """After a first step, freed memory is given back and the peak reset, so that only lasting allocations remain."""
    events, status = [], {"VmRSS": 700, "VmHWM": 1000}
    note = events.append

    class FakePath(str):
        def write_text(self, text):
            note((str(self), text))

    monkeypatch.setattr(bench.cpu_block, "release_memory", lambda: note("release"))
    monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace(malloc_trim=lambda pad: note("trim")))
    monkeypatch.setattr(bench, "Path", FakePath)
    monkeypatch.setattr(bench, "_status", lambda field: (note(field), status[field])[1])
    assert bench.peak_memory(lambda: note("step"), torch.device("cpu")) == 300
    assert events == ["step", "release", "trim", ("/proc/self/clear_refs", "5"), "VmRSS", "step", "VmHWM"]
    # a system without them
    monkeypatch.setattr(ctypes, "CDLL", lambda name: object())
    assert math.isnan(bench.peak_memory(lambda: None, torch.device("cpu")))
