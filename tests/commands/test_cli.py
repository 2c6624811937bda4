"""The hgrn-vision command itself: its list of commands, its help, its errors."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from hgrn_vision import cli
from hgrn_vision.commands import distill

ROOT = Path(__file__).resolve().parents[2]


def call(capsys, *argv):
    try:
        code = cli.main(list(argv))
    except SystemExit as stop:
        code = stop.code
    out, err = capsys.readouterr()
    return code, out, err


@pytest.mark.parametrize("command", [name for name in cli.COMMANDS if name != "train"])
def test_help_fits_a_screen_and_has_an_example(command, capsys):
    code, out, err = call(capsys, command, "--help")
    assert code == 0 and not err
    assert f"example:  hgrn-vision {command}" in out
    assert len(out.splitlines()) <= 40


def test_help_of_train_has_an_example(capsys):
    assert "example:" in call(capsys, "train", "--help")[1]


def test_the_list_of_commands(capsys):
    code, out, _ = call(capsys, "--help")
    assert code == 0 and all(re.search(rf"^    {name}\b", out, re.MULTILINE) for name in cli.COMMANDS)


@pytest.mark.parametrize(
    "argv, words",
    [
        ((), "required: COMMAND"),
        (("fly",), "invalid choice: 'fly'"),
        (("bench", "--fast"), "unrecognized arguments: --fast"),
        (("bench", "--sizes", "big"), "invalid int value: 'big'"),
        (("bench", "--models", "resnet_0"), "unknown model 'resnet_0'"),
        (("bench", "--batch", "1", "2"), "--batch needs one positive number for each of the 5 sizes"),
        (("bench", "--seconds", "0"), "must be positive"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(argv, words, capsys):
    code, out, err = call(capsys, *argv)
    assert (code, out) == (2, "")
    assert words in err and err.count("\n") == 1 and err.startswith("hgrn-vision")


def test_the_slurm_example_of_distill_has_flags_that_exist():
    text = (ROOT / "examples" / "distill_imagenet.sbatch").read_text()
    command = re.search(r"-m hgrn_vision \\\n(.*?) &\n", text, flags=re.DOTALL).group(1).replace("\\\n", " ")
    config = distill.resolve(cli.build_parser("distill").parse_args(shlex.split(command)))
    assert (config.img_size, config.pack, config.micro_batches) == (224, 0, 16)
    subprocess.run(["bash", "-n", ROOT / "examples" / "distill_imagenet.sbatch"], check=True)


def test_arguments_are_those_of_the_process(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["hgrn-vision", "bench", "--seconds", "0"])
    assert cli.main() == 2
    assert capsys.readouterr().err == "hgrn-vision bench: --seconds must be positive and finite, got 0\n"


def test_a_traceback_for_those_who_ask(monkeypatch):
    monkeypatch.setenv("HGRN_VISION_TRACEBACK", "1")
    with pytest.raises(ValueError, match="must be positive"):
        cli.main(["bench", "--seconds", "0"])
