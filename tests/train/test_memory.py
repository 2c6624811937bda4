import ctypes
import subprocess
import sys

import pytest

from hgrn_vision.train import memory

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


@pytest.mark.skipif(sys.platform != "linux", reason="needs glibc")
def test_pages_are_mapped_once_and_the_peak_is_still_seen():
    faults, peak = in_a_process("keep")
    plain_faults, plain_peak = in_a_process("give back")
    assert faults < 50 and plain_faults > 10 * max(faults, 1)
    assert peak == pytest.approx(64, rel=0.1) and plain_peak == pytest.approx(64, rel=0.1)


def test_harmless_without_glibc(monkeypatch):
    monkeypatch.setattr(ctypes, "CDLL", lambda name: object())
    assert not memory.keep_freed_memory()
    monkeypatch.setattr(sys, "platform", "darwin")
    assert not memory.keep_freed_memory()
