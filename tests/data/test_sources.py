"""Where images come from: class folders, CSV files, tar files, torchvision's data sets."""

import os

import numpy as np
import pytest
from image_data import config, png, tree, write, write_tar

from hgrn_vision.data.splits import open_splits


def test_classes_are_in_natural_order(tmp_path):
    train, _ = open_splits(config(data=tree(tmp_path, **{"10": 2, "9": 2, "1": 2}), holdout=0.5))
    assert train.class_names == ["1", "9", "10"]


def test_csv(tmp_path):
    tree(tmp_path, a=3, b=3)
    rows = [f"{folder}/{i}.png,note,{label}\n" for folder, label in (("a", "x y"), ("b", "ü")) for i in range(3)]
    (tmp_path / "list.csv").write_text("file,remark,label\n" + "".join(rows), encoding="utf-8-sig")
    train, validation = open_splits(config(data=str(tmp_path / "list.csv"), holdout=0.3))
    assert train.class_names == ["x y", "ü"] and (len(train), len(validation)) == (4, 2)
    assert np.asarray(train.load(3))[0, 0, 0] == 10
    many = "file,label\n" + "".join(f"a/0.png,c{i}\na/1.png,c{i}\n" for i in range(10_000))
    (tmp_path / "many.csv").write_text(many)
    assert len(open_splits(config(data=str(tmp_path / "many.csv"), holdout=0.5))[0].class_names) == 10_000


@pytest.mark.parametrize(
    "text,message",
    [
        ("a/0.png,x\n", "must start with a line that names the columns file and label"),
        ("path,class\na/0.png,x\n", "must start with a line"),
        ("", "must start with a line"),
        ("file,label\n", "no images in"),
        ("file,label\n../secret.png,x\n", "line 2: ../secret.png is outside"),
        ("file,label\na/0.png,x\n/etc/passwd,x\n", "line 3: /etc/passwd is outside"),
        ("file,label\na/0.png\n", "line 2: no label"),
        ("file,label\n,x\n", "line 2: no file"),
        ("file,label\n\xff\n", "not a CSV file in UTF-8"),
    ],
)
def test_csv_that_cannot_be_used(tmp_path, text, message):
    (tmp_path / "list.csv").write_bytes(text.encode("latin-1"))
    with pytest.raises(ValueError, match=message):
        open_splits(config(data=str(tmp_path / "list.csv"), holdout=0.5))


def layouts(tmp_path) -> dict[str, str]:
    """The same images (red is the class, green the number, blue the split) in every layout that tar files may have."""
    images = {
        part: {f"{name}/{i}.webp": png((red, i, blue)) for name, red in (("cat", 10), ("dog", 20)) for i in range(2)}
        for part, blue in (("train", 100), ("val", 200))
    }
    both = {f"./{part}/{name}": data for part, members in images.items() for name, data in members.items()}
    write_tar(tmp_path / "both.tar", both)
    for part, members in images.items():
        write_tar(tmp_path / "pair" / f"{part}.tar", members)
        by_class = {
            name: write_tar(
                tmp_path / "classes" / part / f"{name}.tar",
                {os.path.basename(key): data for key, data in members.items() if key.startswith(name)},
            )
            for name in ("cat", "dog")
        }
        write_tar(tmp_path / "nested" / f"{part}.tar", {f"{name}.tar": data for name, data in by_class.items()})
    return {name: str(tmp_path / name) for name in ("both.tar", "pair", "classes", "nested")}


def test_tar_files(tmp_path):
    for root in layouts(tmp_path).values():
        for split, blue in zip(open_splits(config(data=root)), (100, 200), strict=True):
            assert split.class_names == ["cat", "dog"] and len(split) == 4, root
            colors = [np.asarray(split.load(i))[0, 0].tolist() for i in range(4)]
            assert sorted(colors) == [[red, i, blue] for red in (10, 20) for i in range(2)], root
            assert [color[0] // 10 - 1 for color in colors] == split.labels.tolist(), root
            assert split.image_name(0).endswith(".webp")


def test_torchvision_sets(tmp_path):
    tree(tmp_path / "folder" / "train", cat=2, dog=2)
    tree(tmp_path / "folder" / "validation", cat=1, dog=1)
    write(tmp_path / "folder" / "train" / "cat" / "1.png", b"broken")
    train, validation = open_splits(config(dataset="torch/image_folder", data=str(tmp_path / "folder")))
    assert train.class_names == ["cat", "dog"] and validation.labels.tolist() == [0, 1]
    assert train.image_name(0).endswith("cat/0.png") and train.load(2).mode == "RGB"
    with pytest.raises(ValueError, match="not an image"):
        train.load(1)
    raw = tmp_path / "mnist" / "MNIST" / "raw"
    digits, labels = np.arange(5 * 28 * 28, dtype=np.uint8), bytes([3, 1, 4, 1, 5])
    for part in ("train", "t10k"):
        header = b"\0\0\x08\x03" + np.array([5, 28, 28], ">u4").tobytes()
        write(raw / f"{part}-images-idx3-ubyte", header + digits.tobytes())
        write(raw / f"{part}-labels-idx1-ubyte", b"\0\0\x08\x01" + np.array([5], ">u4").tobytes() + labels)
    train, _ = open_splits(config(dataset="torch/mnist", data=str(tmp_path / "mnist")))
    assert train.labels.tolist() == list(labels) and train.load(4).size == (28, 28)
    with pytest.raises(ValueError, match="torch/mnist"):
        open_splits(config(dataset="torch/mnist", data=str(tmp_path / "nothing")))
    with pytest.raises(ValueError, match="must start with torch/"):
        open_splits(config(dataset="cifar10", data=str(tmp_path)))
