"""Runs triton_cases.py in processes of its own: triton reads the interpreter's setting when it is imported."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed here")
ROOT = Path(__file__).resolve().parents[2]


def run_cases(selection, **environment):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")} | environment
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        Path(__file__).with_name("triton_cases.py"),
        "-k",
        selection,
    ]
    path = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, env=environment | path, capture_output=True, text=True, cwd=ROOT)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("selection", ["test_long", "not test_long"])
def test_in_the_interpreter(selection):
    run_cases(selection, TRITON_INTERPRET="1")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_on_the_gpu():
    run_cases("test", TRITON_INTERPRET="0")
