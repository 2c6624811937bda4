"""hgrn-vision doctor: finds what is wrong, and says what to do."""

from types import SimpleNamespace

import pytest
import torch

from hgrn_vision import backend
from hgrn_vision.cli import main
from hgrn_vision.commands import doctor

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def no_choice(monkeypatch):
    monkeypatch.delenv(backend.ENVIRONMENT, raising=False)
    # independent of the disk space and memory that are free on this machine
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: SimpleNamespace(free=50 * 2**30))
    monkeypatch.setattr(doctor, "available_memory", lambda: 8 * 2**30)


def examine(capsys):
    """Exit code and lines."""
    code = main(["doctor"])
    lines = capsys.readouterr().out.splitlines()
    return code, lines


def test_a_sound_machine_is_ready(capsys):
    code, lines = examine(capsys)
    assert (code, lines[-1]) == (0, "ready")
    text = "\n".join(lines)
    assert f"torch {torch.__version__.split('+')[0]}" in text
    for name in ("versions", "machine", "devices", "backend", "compiler", "self-test", "space"):
        assert any(line.startswith(name) for line in lines), name
    assert "torch on cpu: ok" in text and "50.0 GiB free" in text and "8.0 GiB available" in text
    chosen = backend.choose(CPU, torch.float32)
    assert f"cpu: {chosen}, " in text
    assert ("cpu on cpu: ok" in text) == (backend.unavailable("cpu") is None)


def test_errors_are_measured():
    assert 0 < doctor.scan_error("torch", CPU, torch.float32) < 1e-5
    assert doctor.scan_error("torch", CPU, torch.bfloat16) > 1e-5


@pytest.mark.parametrize("wrong_on_a_grid", [False, True])
def test_both_kinds_of_scan_are_checked(monkeypatch, wrong_on_a_grid):
    right = doctor.hgru_scan

    def scan(*args, grid=None, **kwargs):
        return right(*args, grid=grid, **kwargs) * (1.001 if (grid is not None) == wrong_on_a_grid else 1)

    monkeypatch.setattr(doctor, "hgru_scan", scan)
    assert doctor.scan_error("torch", CPU, torch.float32) > 5e-4


def test_a_backend_that_computes_wrongly(capsys, monkeypatch):
    right = doctor.hgru_scan
    monkeypatch.setattr(doctor, "hgru_scan", lambda *args, **kwargs: right(*args, **kwargs) * 1.001)
    code, lines = examine(capsys)
    assert code == 1
    assert any("torch on cpu: WRONG" in line for line in lines)
    assert lines[-1].startswith("to do: backend torch gives wrong results on cpu") and "ready" not in lines


@pytest.mark.parametrize("which", ["result", "gradient"])
def test_not_a_number_is_wrong(which, monkeypatch):
    class Spoil(torch.autograd.Function):
        @staticmethod
        def forward(ctx, out):
            return out * float("nan") if which == "result" else out.clone()

        @staticmethod
        def backward(ctx, dout):
            return dout * float("nan")

    right = doctor.hgru_scan
    monkeypatch.setattr(doctor, "hgru_scan", lambda *args, **kwargs: Spoil.apply(right(*args, **kwargs)))
    diagnosis = doctor.Diagnosis()
    assert any("WRONG" in line for line in doctor.self_tests([CPU], diagnosis))
    assert diagnosis.problems


def test_a_backend_that_fails(monkeypatch):
    def fail(*args, **kwargs):
        raise RuntimeError("illegal\ninstruction")

    monkeypatch.setattr(doctor, "hgru_scan", fail)
    diagnosis = doctor.Diagnosis()
    assert "torch on cpu: FAILED, illegal instruction" in doctor.self_tests([CPU], diagnosis)
    assert any(problem.startswith("backend torch fails on cpu") for problem in diagnosis.problems)


def test_a_backend_that_cannot_run(monkeypatch):
    reasons = {"cpu": "no C compiler found", "triton": None, "torch": None}
    monkeypatch.setattr(doctor, "unavailable", reasons.get)
    monkeypatch.setattr(doctor, "backend_for", lambda x, name: "torch")
    diagnosis = doctor.Diagnosis()
    assert doctor.describe_choice(CPU, diagnosis) == "cpu: torch, because cpu cannot run: no C compiler found"
    assert "no C compiler found" in diagnosis.advice[0] and not diagnosis.problems
    lines = doctor.self_tests([CPU], diagnosis)
    assert lines[:2] == ["triton: not run, no GPU that it has kernels for", "cpu: not run, no C compiler found"]


@pytest.mark.parametrize("name", ["cuda", "triton"])
def test_a_requested_backend_that_is_unavailable(name, capsys, monkeypatch):
    monkeypatch.setenv(backend.ENVIRONMENT, name)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    code, lines = examine(capsys)
    assert code == 1
    assert lines[-1].startswith(f"to do: correct or unset {backend.ENVIRONMENT}")


def test_a_requested_backend(monkeypatch):
    monkeypatch.setenv(backend.ENVIRONMENT, "torch")
    text = doctor.describe_choice(CPU, doctor.Diagnosis())
    assert text == f"cpu: torch, because {backend.ENVIRONMENT} asks for it"


def test_the_compiler_and_where_its_libraries_are_kept(monkeypatch, tmp_path):
    monkeypatch.setattr(doctor.cpu_build, "compiler", lambda: (["cc", "-m64"], "cc 12.1\nCopyright"))
    monkeypatch.setattr(doctor.cpu_build, "cache_folder", lambda: tmp_path)
    for name in ("a.so", "b.so", "note.txt"):
        (tmp_path / name).touch()
    assert doctor.describe_compiler() == ["cc -m64: cc 12.1", f"cache: {tmp_path}, 2 libraries"]
    monkeypatch.setattr(doctor.cpu_build, "cache_folder", lambda: None)
    first, second = doctor.describe_compiler()
    assert first == "cc -m64: cc 12.1" and second.startswith("cache: none")

    def missing():
        raise RuntimeError("no C compiler found")

    monkeypatch.setattr(doctor.cpu_build, "compiler", missing)
    assert doctor.describe_compiler() == ["none: no C compiler found"]


def test_no_space(monkeypatch):
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: SimpleNamespace(free=5 * 2**20))
    monkeypatch.setattr(doctor, "available_memory", lambda: 2**29)
    diagnosis = doctor.Diagnosis()
    doctor.describe_space(diagnosis)
    assert len(diagnosis.problems) == 2
    assert "0.0 GiB" in diagnosis.problems[0] and "0.5 GiB" in diagnosis.problems[1]
    monkeypatch.setattr(doctor, "available_memory", lambda: None)
    assert "unknown" in doctor.describe_space(doctor.Diagnosis())[1]
