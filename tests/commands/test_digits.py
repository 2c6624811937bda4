"""hgrn-vision digits: the packaged images as files."""

import numpy as np

from hgrn_vision.cli import main
from hgrn_vision.data.splits import open_splits
from hgrn_vision.train.config import TrainConfig


def test_digits_are_written_whole_and_as_the_demo_divides_them(tmp_path, capsys):
    assert main(["digits", str(tmp_path / "digits")]) == 0
    assert "1,438 images in" in capsys.readouterr().out
    train, validation = open_splits(TrainConfig(data=str(tmp_path / "digits")))
    packaged = open_splits(TrainConfig(data="digits", holdout=0.2))
    for ours, theirs in ((train, packaged[0]), (validation, packaged[1])):
        names = {f"{label}/{row:04d}.png" for row, label in zip(theirs.rows, theirs.labels, strict=True)}
        assert {ours.image_name(i) for i in range(len(ours))} == names
    row = int(validation.image_name(7)[2:6])
    index = int(np.flatnonzero(packaged[1].rows == row)[0])
    assert np.array_equal(np.asarray(validation.load(7)), np.asarray(packaged[1].load(index)))
    assert main(["digits", str(tmp_path / "digits")]) == 2
    assert "already exists" in capsys.readouterr().err
