"""The Triton kernels, compiled for GPUs without having one."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hgrn_vision.kernels import aot

KEPT = pytest.importorskip("hgrn_vision.kernels.triton_scan", reason="triton is not installed here").KEPT
pytest.importorskip("triton.knobs", reason="needs triton 3.4 or newer")
ROOT = Path(__file__).resolve().parents[2]
# with and without gate, in one and two directions: aggregate and apply, forward and backward, and both in one pass;
# carry and its adjoint, in one and two directions; with and without gate: rows and columns, forward and backward
KERNELS = 2 * 2 * (4 + 2) + 2 * 2 + 2 * 4
AOT = [sys.executable, "-m", "hgrn_vision.kernels.aot"]


def run(command, **environment):
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | environment
    return subprocess.run(command, env=environment, capture_output=True, text=True)


def test_report(tmp_path, monkeypatch, capsys):
    """Compiled with an empty cache, and even if the interpreter was asked for."""
    command = [*AOT, "--target", "sm_80", "gfx942", "--dtype", "bf16", "--json"]
    result = run(command, TRITON_CACHE_DIR=str(tmp_path), TRITON_INTERPRET="1")
    assert result.returncode == 0, result.stdout + result.stderr
    report = json.loads(result.stdout)
    check_bars(report)
    check_traffic(report)
    check_model(report)
    check_that_a_broken_bar_fails(report, monkeypatch, capsys)


def test_float32(tmp_path):
    """Wider loads and stores may need more registers than those of bf16."""
    result = run([*AOT, "--target", "sm_80", "--dtype", "fp32", "--json"], TRITON_CACHE_DIR=str(tmp_path))
    assert result.returncode == 0, result.stdout + result.stderr
    kernels = json.loads(result.stdout)["kernels"]
    assert len(kernels) == KERNELS
    assert all(kernel["dtype"] == "fp32" and kernel["failures"] == [] for kernel in kernels)


def check_bars(report):
    kernels = report["kernels"]
    assert len(kernels) == 2 * KERNELS
    assert {kernel["target"] for kernel in kernels} == {"sm_80", "gfx942"}
    for kernel in kernels:
        assert kernel["registers"] <= (128 if kernel["target"] == "sm_80" else 176), kernel
        assert kernel["registers"] > 16 and kernel["seconds"] > 0
        assert kernel["spills"] == kernel["stack"] == kernel["shared"] == kernel["atomics"] == 0, kernel


def check_traffic(report):
    by_name = {
        (kernel["kernel"], kernel["target"]): kernel
        for kernel in report["kernels"]
        if kernel["directions"] == 2 and kernel["gate"] in (True, None)
    }
    for target in ("sm_80", "gfx942"):
        # reads c and f, bias and parameters once per chunk of 16; writes two states and the product of decays
        aggregate = by_name["forward_aggregate", target]
        assert aggregate["loads"] == 3 + (3 + 1 + 8) / 16 and aggregate["stores"] == 5 / 16
        assert aggregate["memory"] == 3 * 2 + 5 * 4 / 16 and aggregate["cache"] == (3 + 1 + 8) * 4 / 16
        # writes dx, and a sum for each of its five fields, the lower bound and two angles
        apply = by_name["backward_apply", target]
        assert apply["stores"] == 5 + 8 / 16
        assert apply["memory"] == 7 * 2 + 5 * 2 + (4 + 4 + 8) * 4 / 16
        # all but the last group of two tokens are read twice, and parameters once per chunk
        assert apply["cache"] == 7 * 2 * 14 / 16 + (5 + 1 + 8) * 4 / 16
        # all but the first group is read twice, but its gates once; a state is kept per group
        sequence = by_name["forward_sequence", target]
        again, kept = 1 - KEPT["forward"] / 256, 2 * 4 / KEPT["forward"]
        assert sequence["memory"] == 5 * 2 + 2 * 2 + kept * again
        assert sequence["cache"] == 3 * 2 * again + kept + (5 + 1 + 8) * 4 / 256
        # of every two groups in a chunk, one is read a third time
        sequence = by_name["backward_sequence", target]
        again, kept = 1 - KEPT["backward"] / 256, 4 * 4 / KEPT["backward"]
        assert sequence["memory"] == 7 * 2 + 5 * 2 + kept * again + 8 * 4 / 256
        assert sequence["cache"] == 7 * 2 * (again + 1 / 2) + kept + (5 + 1 + 8) * 4 / 256
        check_grid_traffic(by_name, target)
    assert len(report["scan"]) == 2 * 2 * 2 * 2 + 2 * 2
    for row in report["scan"]:
        assert row["least"] < row["memory"] + 1e-9 and row["cache"] > 0, row
        assert row["memory"] < (2.1 if row["path"] == "chunks" else 1.3) * row["least"], row
        assert row["once"] == row["least"] or row["path"] == "grid"


def check_grid_traffic(by_name, target):
    """The input is read from memory once for rows and once for columns, its gate only for columns."""
    sides, kept = 1 - KEPT["forward"] / 16, 2 * 4 / KEPT["forward"]
    rows, columns = (by_name[f"forward_{lines}", target] for lines in ("rows", "columns"))
    assert rows["memory"] == 3 * 2 + 2 * 4 + kept * sides
    assert columns["memory"] == 5 * 2 + 2 * 4 + 2 * 2 + kept * sides
    sides, kept = 1 - KEPT["backward"] / 16, 4 * 4 / KEPT["backward"]
    rows, columns = (by_name[f"backward_{lines}", target] for lines in ("rows", "columns"))
    assert rows["memory"] == 7 * 2 + 5 * 4 + kept * sides + 8 * 4 / 16
    assert columns["memory"] == 7 * 2 + 5 * 4 + 5 * 2 + kept * sides + 8 * 4 / 16


def check_model(report):
    rows = {(row["gpu"], row["size"], row["path"], row["step"]): row for row in report["model"]}
    assert len(rows) == 24
    # 14 bytes for each of 128 x 256 x 192 at 2.04 TB/s
    assert rows["A100", "tiny", "chunks", "forward"]["least"] == pytest.approx(43.2, abs=0.1)
    # 128 batch rows are 384 programs in the tiny model and 768 in the small one
    assert rows["A100", "tiny", "chunks", "forward"]["taken"] and rows["A100", "small", "one pass", "forward"]["taken"]
    for (gpu, size, path, step), row in rows.items():
        assert 0 < row["least"] < row["scan"] < row["uncached"] and row["matmuls"] > 0
        if path == "grid":
            assert row["taken"]
        else:
            assert row["taken"] != rows[gpu, size, "chunks" if path == "one pass" else "one pass", step]["taken"]
        if path == "one pass":
            assert row["scan"] < 0.7 * rows[gpu, size, "chunks", step]["scan"]


def check_that_a_broken_bar_fails(report, monkeypatch, capsys):
    kernels = [kernel for kernel in report["kernels"] if kernel["target"] == "sm_80"]
    over = [kernel for kernel in kernels if kernel["registers"] > 100]
    monkeypatch.setitem(aot.REGISTERS, "sm_80", 100)
    monkeypatch.setattr(aot, "COMPILE_SECONDS", 0)
    monkeypatch.setattr(aot, "compile_all", lambda targets, dtypes: [aot.Report(**kernel) for kernel in kernels])
    assert aot.main(["--target", "sm_80"]) == 1
    out, err = capsys.readouterr()
    failed = [line for line in err.splitlines() if line.startswith("FAILED")]
    assert len(failed) == len(over) > 0 and all("at most 100" in line for line in failed)
    assert "sm_80 backward_apply bf16 gate=True directions=2" in err
    assert sum(line.startswith("warning") for line in err.splitlines()) == len(kernels)
    assert "backward_apply" in out and "MODEL, not measured" in out


COUNTS = dict(registers=64, spills=0, stack=0, shared=0, atomics=0, seconds=1.0, loads=1.0, stores=1.0)


def test_bytes_of_a_step_are_those_of_all_its_kernels_and_of_adding_up_the_sums(monkeypatch, capsys):
    def report(path, step, kernel, dtype, gate, memory, cache=0.0, sums=0.0):
        return aot.Report("sm_80", path, step, kernel, dtype, gate, 2, **COUNTS, memory=memory, cache=cache, sums=sums)

    reports = [
        report("chunks", "forward", "aggregate", "bf16", True, 10.0, 3.0),
        report("chunks", "forward", "carry", "fp32", None, 2.0),
        report("chunks", "forward", "apply", "bf16", True, 14.0, 5.0),
        report("chunks", "forward", "apply", "bf16", False, 99.0),
        report("one pass", "backward", "sequence", "bf16", True, 30.0, sums=1.5),
    ]
    forward, _, backward = aot.scan_bytes(reports)
    assert (forward["memory"], forward["cache"], forward["least"]) == (26.0, 8.0, (5 + 2) * 2)
    # reads x and the gradient of the output, writes that of x
    assert (backward["memory"], backward["least"], backward["ratio"]) == (31.5, (5 + 2 + 5) * 2, 31.5 / 24)
    monkeypatch.setattr(aot, "compile_all", lambda targets, dtypes: reports)
    assert aot.main(["--target", "sm_80", "--json"]) == 1
    failure = "FAILED one pass backward bf16 gate=True directions=2: 1.31 times the least bytes, at most 1.3\n"
    assert capsys.readouterr().err == failure


@pytest.mark.parametrize("name", ["spills", "stack", "atomics"])
def test_every_bar_is_judged(name):
    counts = COUNTS | dict(memory=2.0, cache=0.0, sums=0.0)
    good = aot.Report("sm_80", "chunks", "forward", "carry", "fp32", None, 2, **counts)
    bad = aot.Report("sm_80", "chunks", "forward", "carry", "fp32", None, 2, **counts | {name: 4})
    for report in (good, bad):
        aot.judge(report)
    assert good.failures == [] and bad.failures == [f"{name} 4, none allowed"]


def test_spills_stack_and_atomics_are_seen():
    code = """
    global_atomic_add_f32 v0, v1, s[0:1]
    .private_segment_fixed_size: 124
    .sgpr_spill_count: 1
    .vgpr_count:     168
    .vgpr_spill_count: 30
"""
    assert aot.read_amdgcn(code) == {"registers": 168, "stack": 124, "spills": 31, "atomics": 1}


@pytest.mark.parametrize(
    "arguments, says", [(["--target", "sm_12"], "'sm_12' is unknown"), (["--dtype", "fp64"], "'fp64' is unknown")]
)
def test_unknown_names(arguments, says, capsys):
    assert aot.main(arguments) == 2
    error = capsys.readouterr().err
    assert says in error and len(error.splitlines()) == 1


def test_without_triton():
    code = "import sys; sys.modules['triton'] = None; from hgrn_vision.kernels import aot; sys.exit(aot.main([]))"
    result = run([sys.executable, "-c", code])
    assert result.returncode == 2 and "triton" in result.stderr and len(result.stderr.splitlines()) == 1
