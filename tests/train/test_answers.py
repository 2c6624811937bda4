"""Kept answers: the teacher is asked about each view once, and a damaged answer counts as none."""

import numpy as np
import pytest
import torch

from hgrn_vision.data.pack import PackedPhotos
from hgrn_vision.data.spec import DataSpec
from hgrn_vision.train.answers import KeptAnswers, answers_path
from hgrn_vision.train.config import TrainConfig, from_mapping
from hgrn_vision.train.teachers import Answer, Teacher

SPEC = DataSpec((3, 8, 8), (0.5,) * 3, (0.5,) * 3, "bicubic", 1.0)
SETTINGS = {"photos": ("a",), "pack": 8, "mixup": 0.0, "cutmix": 0.0, "reprob": 0.0, "views": 2}


class Oracle:
    """Gives answers that show which position was asked about, and in which call."""

    def __init__(self):
        self.asked = []

    def __call__(self, positions):
        self.asked.append(positions.tolist())
        return np.stack([np.full(3, 10 * len(self.asked) + position, np.float16) for position in positions])


def test_each_view_is_asked_about_once(tmp_path):
    kept, oracle = KeptAnswers(tmp_path / "a", 6, 3), Oracle()
    assert kept.lookup(np.array([4, 1]), oracle)[:, 0].tolist() == [10, 11]
    assert kept.lookup(np.array([1, 5, 4]), oracle)[:, 0].tolist() == [11, 21, 10]
    # another process opens the same file
    assert KeptAnswers(tmp_path / "a", 6, 3).lookup(np.array([5, 1]), oracle)[:, 0].tolist() == [21, 11]
    assert oracle.asked == [[0, 1], [1]]


@pytest.mark.parametrize("byte", [4 * 2 + 1, 4 * 6 + 2 * 3 * 2 + 5], ids=["checksum", "logits"])
def test_a_damaged_answer_is_asked_for_again(tmp_path, byte):
    path, oracle = tmp_path / "a", Oracle()
    KeptAnswers(path, 6, 3).lookup(np.arange(6), oracle)
    content = bytearray(path.read_bytes())
    content[byte] ^= 1
    path.write_bytes(content)
    answers = KeptAnswers(path, 6, 3).lookup(np.arange(6), oracle)
    assert oracle.asked[1:] == [[2]] and answers[:, 0].tolist() == [10, 11, 22, 13, 14, 15]


def test_an_answer_of_zeros_is_an_answer(tmp_path):
    kept, asked = KeptAnswers(tmp_path / "a", 1, 3), []
    for _ in range(2):
        kept.lookup(np.array([0]), lambda missing: asked.append(missing) or np.zeros((1, 3), np.float16))
    assert len(asked) == 1


def test_a_full_disk_is_an_error(tmp_path):
    with pytest.raises(OSError, match="[Ff]ile too large|No space"):
        KeptAnswers(tmp_path / "a", 2**50, 1000)


def test_the_teacher_sees_the_images_that_it_has_not_answered(tmp_path):
    seen = []

    def network(images):
        seen.append(images[:, 0, 0, 0].tolist())
        return Answer(images[:, :, 0, 0], None)

    teacher = Teacher("t", network, SPEC, None, 3)
    kept, images = KeptAnswers(tmp_path / "a", 10, 3), torch.arange(4.0).view(4, 1, 1, 1).expand(4, 3, 8, 8)
    kept.logits_of(teacher, images[:2], SPEC, torch.tensor([3, 7]))
    logits = kept.logits_of(teacher, images, SPEC, torch.tensor([3, 7, 8, 9]))
    assert seen == [[0, 1], [2, 3]] and logits.dtype == torch.float32
    assert logits[:, 0].tolist() == [0, 1, 2, 3]


def packed(checksum=1):
    arrays = np.array([b"a.jpg"]), np.array([0, 3]), np.array([[1, 1]]), np.array([checksum], np.uint32)
    return PackedPhotos("p", *arrays, np.zeros((1, 32), np.uint8), [])


def path_of(photos=None, digest="d", side=8, **settings):
    teacher = Teacher("t", None, SPEC._replace(input_size=(3, side, side)), None, 3, digest=digest)
    return answers_path(from_mapping({**SETTINGS, **settings}), photos or packed(), teacher, SPEC)


@pytest.mark.parametrize(
    "other",
    [{"photos": packed(2)}, {"digest": "e"}, {"side": 9}, {"views": 3}, {"scale": (0.5, 1)}, {"hflip": 0.0}],
    ids=str,
)
def test_other_views_have_other_answers(other):
    assert path_of(**other) != path_of()
    assert path_of(seed=5, lr=1.0) == path_of()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pack": 0}, "packed photographs"),
        ({"photos": ()}, "packed photographs"),
        ({"mixup": 0.1}, "change a view each time"),
        ({"cutmix": 0.1}, "change a view each time"),
        ({"reprob": 0.1}, "change a view each time"),
        ({"distill": "both"}, "only logits are kept, not both"),
        ({"views": -1}, "must not be negative"),
    ],
    ids=str,
)
def test_views_that_cannot_be_kept(change, message):
    with pytest.raises(ValueError, match=message):
        from_mapping({**SETTINGS, **change})
    assert TrainConfig().views == 0
