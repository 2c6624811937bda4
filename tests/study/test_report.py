"""What the page of a study is told."""

import math
from dataclasses import replace

import pytest
from training import digits

from hgrn_vision.data.spec import DataSpec
from hgrn_vision.study import report
from hgrn_vision.study.definition import Arm, Study
from hgrn_vision.study.folder import RunResult, summarise
from hgrn_vision.study.plan import ArmPlan, Plan
from hgrn_vision.study.report import spell_count, write_study_page

SPEC = DataSpec((3, 8, 8), (0.5,) * 3, (0.5,) * 3, "bicubic", 1.0)


@pytest.mark.parametrize(
    "value, text", [(999, "999"), (1000, "1.00k"), (6.1e6, "6.10M"), (1e9, "1.00G"), (math.nan, "-"), (0, "0")]
)
def test_large_numbers_are_short(value, text):
    assert spell_count(value) == text


def run(arm, seed, top1, status="finished"):
    numbers = dict(parameters=5, multiply_adds=7.0, epochs=2, steps=4, best_epoch=1, val_loss_last=1.0)
    numbers |= dict(train_loss_last=1.0, images_per_second=10.0, peak_memory=3.0, training_seconds=2.0)
    return RunResult(arm, seed, status, "m", top1_last=top1, top1_best=top1 + 1, folder=f"{arm}/seed{seed}", **numbers)


def told(monkeypatch, minutes=0.0, sequence=False, other=SPEC, training=1000):
    """What the page is given for a study of two arms, of which one run diverged and one is still to come."""
    study = Study({}, (Arm("a b"), Arm("c")), seeds=(0, 1), minutes_per_run=minutes, sequence=sequence)
    config = digits(epochs=2, batch_size=64)
    arms = [
        ArmPlan(study.arms[0], config, 2, 5, 7.0, SPEC),
        ArmPlan(study.arms[1], replace(config, lr=1.0, batch_size=32), 2, 5, 7.0, other),
    ]
    plan = Plan(study, arms, {"training": training, "validation": 200, "classes": 10})
    results = [run("a b", 0, 50.0), run("c", 0, 60.0), run("a b", 1, 1.0, "diverged")]
    log = [
        {"step": "2", "images_per_second": "1", "val_top1": "40"},
        {"step": "4", "images_per_second": "2", "val_top1": "50"},
    ]
    pages = []
    monkeypatch.setattr(report, "write_study", lambda path, data: pages.append(data))
    summaries = summarise(results, ["a b", "c"], [])
    logs = {(each.arm, each.seed): log for each in results}
    write_study_page("report.html", plan, results, summaries, logs, {"command": "hgrn-vision compare", "torch": "2"})
    return pages[0]


def test_the_page_is_told_of_runs_that_count_and_of_all_others(monkeypatch):
    page = told(monkeypatch, minutes=0.0)
    assert (page.title, page.command, page.versions) == (
        "2 arms, 2 seeds on digits",
        "hgrn-vision compare",
        {"torch": "2"},
    )
    first, second = page.arms
    assert first.last == [50.0] and len(first.curves) == 2 and first.cells[0] == "1 + 1 diverged"
    assert first.difference is None and second.difference[0] == 10.0
    assert [(row["status"], row["report"]) for row in page.runs] == [
        ("finished", "a%20b/seed0/report.html"),
        ("finished", "c/seed0/report.html"),
        ("diverged", "a%20b/seed1/report.html"),
    ]
    notes = " ".join(page.notes)
    assert "3 of 4 runs are done" in notes and "same budget of 4 optimizer steps" in notes and "diverged" in notes
    # what differs between arms, and the seed, is no setting of the study
    assert page.settings["epochs"] == 2 and not {"lr", "batch_size", "seed"} & page.settings.keys()


def test_curves_go_by_what_the_arms_have_equal(monkeypatch):
    page = told(monkeypatch, minutes=0.0)
    assert page.x_label == "optimizer steps" and page.arms[0].curves[0] == [(2.0, 40.0), (4.0, 50.0)]
    page = told(monkeypatch, minutes=3.0)
    # 2 steps of 64 images, at 1 and then 2 images a second
    assert page.x_label == "minutes of training"
    assert page.arms[0].curves[0] == [(pytest.approx(128 / 60), 40.0), (pytest.approx(192 / 60), 50.0)]
    assert page.arms[1].curves[0][-1] == (pytest.approx(96 / 60), 50.0)
    assert any("Every run has 3 minutes of training" in note for note in page.notes)


def test_the_page_says_how_the_pixels_are_read(monkeypatch):
    def notes(**study):
        return " ".join(told(monkeypatch, **study).notes)

    plain, pixels, unequal = notes(), notes(sequence=True), notes(other=SPEC._replace(mean=(0.4,) * 3))
    assert "read pixel by pixel" in pixels and "read pixel by pixel" not in plain
    assert "normalized" in unequal and "normalized" not in plain


def test_the_page_counts_the_training_images_of_each_arm(monkeypatch):
    assert "after training on 1,000 others." in told(monkeypatch).notes[0]
    unequal = told(monkeypatch, training={"a b": 1000, "c": 500})
    assert "after training on 1,000 (a b) or 500 (c) others." in unequal.notes[0]
