"""Arguments shared by several commands."""

import argparse
import io
import sys

import pytest

from hgrn_vision.commands._flags import (
    add_inference_arguments,
    add_setting_flags,
    at_least_one,
    find_images,
    given_settings,
)
from hgrn_vision.data.images import MAX_PIXELS


def parsed(add, *argv):
    parser = argparse.ArgumentParser()
    add(parser)
    return parser.parse_args(argv)


@pytest.mark.parametrize("text", ["0", "-1", "1.5", "many", "", "²"])
def test_texts_that_are_not_positive_integers(text):
    with pytest.raises(argparse.ArgumentTypeError, match="is not a positive integer"):
        at_least_one(text)


def test_positive_integers():
    assert (at_least_one("1"), at_least_one("032")) == (1, 32)


def test_what_commands_on_many_images_take():
    plain = parsed(add_inference_arguments)
    assert vars(plain) == {"img_size": None, "batch_size": 32, "max_pixels": MAX_PIXELS, "device": "auto"}
    argv = ["--img-size", "64", "--batch-size", "1", "--max-pixels", "99", "--device", "cpu"]
    given = vars(parsed(add_inference_arguments, *argv))
    assert given == {"img_size": 64, "batch_size": 1, "max_pixels": 99, "device": "cpu"}


@pytest.mark.parametrize("flag", ["--img-size", "--batch-size", "--max-pixels"])
def test_zero_is_refused_for_each(flag, capsys):
    with pytest.raises(SystemExit, match="2"):
        parsed(add_inference_arguments, flag, "0")
    assert f"argument {flag}: '0' is not a positive integer" in capsys.readouterr().err


def test_only_what_was_typed_is_given():
    assert given_settings(parsed(add_setting_flags)) == {}
    argv = ["--epoch-steps", "none", "--model-args", "depth=3", "name=a=b", "--no-balance", "--betas", "0.1", "0.2"]
    assert given_settings(parsed(add_setting_flags, *argv, "--sched", "poly")) == {
        "epoch_steps": None,
        "model_args": {"depth": 3, "name": "a=b"},
        "balance": False,
        "betas": [0.1, 0.2],
        "sched": "poly",
    }


@pytest.mark.parametrize(
    "argv, message",
    [
        (["--model-args", "depth"], "--model-args takes KEY=VALUE, got 'depth'"),
        (["--model-args", "=3"], "--model-args takes KEY=VALUE, got ''"),
        (["--epoch-steps", "few"], "invalid int value: 'few'"),
        (["--betas", "0.1"], "expected 2 arguments"),
        (["--sched", "none"], "invalid choice: 'none'"),
    ],
)
def test_settings_that_cannot_be_read(argv, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        parsed(add_setting_flags, *argv)
    assert message in capsys.readouterr().err


def test_arguments_of_a_model_are_numbers_where_they_can_be():
    typed = ["depth=3", "rate=1e-1", "eps=-2E-06", "gate=false", "sides=[1, 2]", "name=1e", "open=[1", "none=none"]
    assert given_settings(parsed(add_setting_flags, "--model-args", *typed))["model_args"] == {
        "depth": 3,
        "rate": 0.1,
        "eps": -2e-6,
        "gate": False,
        "sides": [1, 2],
        "name": "1e",
        # no YAML: the model's constructor is to refuse it
        "open": "[1",
        "none": "none",
    }


def test_help_shows_defaults_and_only_what_it_is_told_to():
    parser = argparse.ArgumentParser()
    add_setting_flags(parser)
    text = " ".join(parser.format_help().split())
    assert "[0.9 0.98]" in text and "[off]" in text and "[none]" in text and "--lr" in text
    parser = argparse.ArgumentParser()
    add_setting_flags(parser, leave_out=("seed",), shown={"lr": "how fast"})
    text = parser.format_help()
    assert "how fast" in text and "--weight-decay" not in text
    assert given_settings(parser.parse_args(["--weight-decay", "0.5"])) == {"weight_decay": 0.5}
    with pytest.raises(SystemExit, match="^2$"):
        parser.parse_args(["--seed", "1"])


def test_images_are_found_in_order_and_missing_ones_are_passed_on(tmp_path, monkeypatch):
    for name in "abcd":
        (tmp_path / "b" / name).mkdir(parents=True)
    for folder in ("a", "empty"):
        (tmp_path / folder).mkdir()
    for name in ("b/2.png", "b/10.JPG", "a/1.webp", "b/.hidden.png", "b/c/3.png", "b/d/4.png", "b/a/5.png"):
        (tmp_path / name).touch()
    for name in ("notes.txt", "[odd].png", "o.png"):
        (tmp_path / "a" / name).touch()
    monkeypatch.chdir(tmp_path)
    assert list(find_images(["b", "missing.png"])) == [
        *("b/10.JPG", "b/2.png", "b/a/5.png", "b/c/3.png", "b/d/4.png"),
        "missing.png",
    ]
    # a folder without images gets its own row, and so does a pattern without matches
    assert list(find_images(["empty", "*.gif"])) == ["empty", "*.gif"]
    assert list(find_images(["b/*.png", "**/3.png"])) == ["b/2.png", "b/c/3.png"]
    # the name of an existing file is not a pattern
    assert list(find_images(["a/[odd].png"])) == ["a/[odd].png"]
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"a/1.webp\r\n\n-\nb/c\n")))
    assert list(find_images(["-"])) == ["a/1.webp", "b/c/3.png"]
