"""The C library: how it is loaded, with how many threads it is called, and where it cannot be had."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hgrn_vision.kernels import cpu_build, cpu_glu, cpu_library

REASON = cpu_library.unavailable()
pytestmark = pytest.mark.skipif(bool(REASON), reason=f"no C kernels here: {REASON}")


@pytest.mark.parametrize("numel, want", [(32768, 3), (32767, 1)])
def test_as_many_threads_as_torch_is_told_where_the_work_is_worth_it(numel, want, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    assert cpu_library.threads(torch.empty(numel)) == want


def run(code, **environment):
    """Run Python code in a process of its own, with the kernels' modules imported."""
    program = "import torch; from hgrn_vision.kernels import cpu_glu, cpu_library, cpu_scan\n" + code
    path = str(Path(__file__).resolve().parents[2])
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"} | environment
    return subprocess.Popen([sys.executable, "-c", program], env=environment, stdout=subprocess.PIPE, text=True)


needs_proc = pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs /proc")
LARGE = "x, bound, theta = torch.randn(8, 64, 160), torch.rand(32), torch.rand(2, 32)\n"


@needs_proc
def test_shares_the_process_with_torch():
    """One OpenMP runtime, denormals left alone, nothing printed."""
    code = """
tiny = lambda: (torch.tensor([1e-30]) * torch.tensor([1e-10])).item() > 0
assert tiny()
cpu_scan.forward(x, bound, theta, None)
maps = open('/proc/self/maps').read()
print(tiny())
print(*{line.split()[-1] for line in maps.splitlines() if 'gomp' in line or 'iomp' in line}, sep='\\n')
"""
    lines = run(LARGE + code).communicate()[0].splitlines()
    assert lines[0] == "True"
    assert len(lines) == 2


@pytest.mark.machine
@needs_proc
def test_starts_the_threads_it_is_told():
    code = """
import os
tasks = lambda: len(os.listdir('/proc/self/task'))
cpu_scan.forward(x, bound, theta, None)
torch.set_num_threads(3)
alone = tasks()
cpu_scan.forward(x, bound, theta, None)
print(tasks() - alone)
"""
    assert run(LARGE + code).communicate()[0] == "2\n"


@pytest.fixture
def fresh(monkeypatch, tmp_path):
    """Kernels not yet loaded, and an empty cache folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cpu_library._library.cache_clear()
    yield tmp_path / "hgrn_vision"
    monkeypatch.undo()
    cpu_library._library.cache_clear()


def works():
    return cpu_glu.forward(torch.tensor([[0.0, 1.0]]), None).tolist() == [[0.0]]


def test_processes_that_build_at_once(fresh):
    code = "print(cpu_library.unavailable(), cpu_glu.forward(torch.tensor([[0.0, 1.0]]), None).tolist())"
    both = [run(code) for _ in range(2)]
    assert [process.communicate()[0] for process in both] == ["None [[0.0]]\n"] * 2
    assert fresh.stat().st_mode & 0o777 == 0o700
    kept = list(fresh.iterdir())
    assert kept and all(re.fullmatch(r"[0-9a-f]{16}-[0-9a-f]{16}\.so", path.name) for path in kept)
    modified = {path: path.stat().st_mtime_ns for path in kept}
    assert cpu_library.unavailable() is None and works()
    assert {path: path.stat().st_mtime_ns for path in fresh.iterdir()} == modified


def test_truncated_library_is_built_again(fresh):
    assert cpu_library.unavailable() is None
    (library,) = fresh.iterdir()
    whole = library.read_bytes()
    # a file of its own: the one that is loaded must stay whole
    library.unlink()
    library.write_bytes(whole[: len(whole) // 2])
    cpu_library._library.cache_clear()
    assert cpu_library.unavailable() is None and works()
    (library,) = fresh.iterdir()
    assert len(library.read_bytes()) == len(whole)


def test_cache_folder_that_cannot_be_made(fresh, monkeypatch):
    fresh.parent.joinpath("file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(fresh.parent / "file"))
    assert cpu_library.unavailable() is None and works()
    assert not fresh.exists()


@pytest.mark.skipif(not hasattr(os, "getuid") or os.getuid() != 0, reason="only root can give a folder away")
def test_cache_folder_of_someone_else_is_not_used(fresh):
    fresh.mkdir()
    os.chown(fresh, 12345, 12345)
    assert cpu_library.unavailable() is None and works()
    assert not list(fresh.iterdir())


@pytest.mark.parametrize(
    "compiler, says", [("/bin/false", "status 1"), ("no-such-cc", "No such file"), (None, "no C compiler")]
)
def test_no_compiler(fresh, monkeypatch, compiler, says):
    if compiler:
        monkeypatch.setenv("CC", compiler)
    else:
        monkeypatch.delenv("CC", raising=False)
        monkeypatch.setenv("PATH", str(fresh))
    reason = cpu_library.unavailable()
    assert says in reason and "\n" not in reason
    with pytest.raises(RuntimeError, match="cannot be used"):
        works()


def test_failed_build_names_the_error(fresh, monkeypatch):
    monkeypatch.setattr(cpu_library, "FLAGS", (*cpu_library.FLAGS, "-include", "no_such_header.h"))
    assert "no_such_header.h" in cpu_library.unavailable()


def test_compiler_without_openmp_builds_for_one_thread(fresh, monkeypatch):
    monkeypatch.setattr(cpu_build, "_openmp_runtime", lambda: "/no/such/libgomp.so")
    assert cpu_library.unavailable() is None and works()
