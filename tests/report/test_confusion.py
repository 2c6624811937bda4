"""The figure of a confusion matrix: rows, columns, names, numbers."""

import numpy as np
import pytest

from hgrn_vision.report.confusion import CELLS, NAMED, NUMBERED, confusion_figure


def drawn(counts, names):
    axes, bar = confusion_figure(np.asarray(counts), names).axes
    return axes, np.asarray(axes.images[0].get_array()), bar


def test_rows_are_true_classes_and_columns_predicted_ones():
    axes, shares, _ = drawn([[6, 2, 0], [0, 1, 3], [0, 0, 0]], ["a", "$b$", "x" * 30])
    np.testing.assert_allclose(shares, [[0.75, 0.25, 0], [0, 0.25, 0.75], [0, 0, 0]])
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("predicted", "true")
    names = ["a", "$b$", "x" * 23 + "…"]
    for labels in (axes.get_xticklabels(), axes.get_yticklabels()):
        assert [label.get_text() for label in labels] == names
        assert not any(label.get_parse_math() for label in labels)
    # at (column, row); light on dark cells
    texts = {text.get_position(): (text.get_text(), text.get_color()) for text in axes.texts}
    light, dark = "white", "black"
    assert texts == {(0, 0): ("6", light), (1, 0): ("2", dark), (1, 1): ("1", dark), (2, 1): ("3", light)}
    assert tuple(axes.images[0].get_extent()) == (-0.5, 2.5, 2.5, -0.5)


@pytest.mark.parametrize("classes", [NUMBERED, NUMBERED + 1, NAMED, NAMED + 1])
def test_names_and_numbers_where_they_fit(classes):
    axes, _, _ = drawn(np.eye(classes, dtype=int), [f"class {i}" for i in range(classes)])
    assert len(axes.texts) == (classes if classes <= NUMBERED else 0)
    named = [label.get_text() for label in axes.get_yticklabels()] == [f"class {i}" for i in range(classes)]
    assert named == (classes <= NAMED)
    assert axes.images[0].norm.gamma == (1 if classes <= NAMED else 0.4)


def test_many_classes_share_cells():
    classes = 2 * CELLS
    counts = np.zeros((classes, classes), int)
    counts[0, 0], counts[1, 2], counts[1, 5], counts[-1, -1] = 1, 2, 1, 7
    _, shares, _ = drawn(counts, [str(i) for i in range(classes)])
    assert shares.shape == (CELLS, CELLS)
    assert shares[0, :3].tolist() == [0.25, 0.5, 0.25] and shares[-1, -1] == 1 and shares.sum() == 2


@pytest.mark.parametrize("classes", [1, 20, 41, 700])
def test_confusion_matrix_of_any_size(classes):
    counts = np.eye(classes, dtype=np.int32) * 3
    figure = confusion_figure(counts, [f"class {i}, $ and a name that is far too long to fit" for i in range(classes)])
    axes = figure.axes[0]
    cells = axes.images[0].get_array()
    assert len(cells) == min(classes, 300)
    np.testing.assert_allclose(np.asarray(cells).sum(axis=1), 1)
    assert len(axes.texts) == (classes if classes <= 20 else 0)
    figure.canvas.draw()
