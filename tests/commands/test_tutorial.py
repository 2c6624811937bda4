"""The commands of the tutorial, in order, in a fresh folder."""

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from hgrn_vision.cli import main

ROOT = Path(__file__).resolve().parents[2]
TUTORIAL = ROOT / "docs" / "tutorial.md"
# the commands as they are written, but a small model and few steps
SHORTER = {
    "train": "--model-args patch_size=2 embed_dim=16 depth=1 --epochs 1 --epoch-steps 3 --eval-images 64",
    "finetune": "--epochs 1 --epoch-steps 3",
    "explain": "--steps 4",
}


def commands():
    """The lines of the tutorial's shell blocks, each as a list of words."""
    blocks = re.findall(r"```sh\n(.*?)```", TUTORIAL.read_text(), flags=re.DOTALL)
    return [shlex.split(line) for block in blocks for line in block.replace("\\\n", " ").splitlines()]


def test_the_commands_run_in_order(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    told = {}
    for words in commands():
        if words[0] == "python":
            answer = subprocess.run([sys.executable, *words[1:]], capture_output=True, text=True)
            assert answer.returncode == 0, answer.stderr
            told["python"] = answer.stdout
        else:
            assert words[0] == "hgrn-vision"
            code = main([*words[1:], *SHORTER.get(words[1], "").split()])
            told[words[1]], errors = capfd.readouterr()
            assert code == 0, f"{shlex.join(words)}: {errors}"
    assert list(told) == ["digits", "train", "finetune", "evaluate", "predict", "explain", "export", "python"]
    assert "Starting from runs/demo" in told["finetune"] and "hgrn-vision predict runs/digits" in told["finetune"]
    # the file without torch gives the answer of the model
    assert told["python"].split()[0] == re.search(r"7/\S+\.png\s+(\d)\s", told["predict"]).group(1)
    for name in ("runs/digits/report.html", "evaluation/confusion.png", "explanation/index.html", "digits.onnx"):
        assert (tmp_path / name).stat().st_size > 1000, name


def test_the_figures_are_there():
    figures = re.findall(r"!\[[^\]]*\]\(([^)]+)\)", TUTORIAL.read_text())
    assert len(figures) >= 4
    for name in figures:
        assert (TUTORIAL.parent / name).is_file(), name
