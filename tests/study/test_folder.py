"""The folder of a study: its tables, its record, and what the seeds say."""

import csv
import math

import pytest
from training import SMALL

from hgrn_vision.study.definition import study_from_mapping
from hgrn_vision.study.folder import (
    RunResult,
    check_record,
    describe_study,
    read_runs,
    summarise,
    write_record,
    write_runs,
    write_summary_table,
)
from hgrn_vision.study.report import sentence

QUICK = {"epochs": 2, "epoch_steps": 2, "batch_size": 32, "eval_images": 64, "device": "cpu", "model_args": SMALL}


def result(arm: str, seed: int, top1: float, status: str = "finished", **more) -> RunResult:
    values = dict(model="m", parameters=5, multiply_adds=7.0, epochs=2, steps=4, top1_best=top1 + 1, best_epoch=1)
    values |= dict(
        val_loss_last=1.0, train_loss_last=1.0, images_per_second=10.0, peak_memory=3.0, training_seconds=2.0
    )
    return RunResult(arm, seed, status, top1_last=top1, folder="f", **values | more)


def test_a_diverged_run_counts_as_diverged_and_not_in_the_means():
    results = [result("a", 0, 50.0), result("b", 0, 60.0), result("a", 1, 52.0), result("b", 1, math.nan, "diverged")]
    first, other = summarise(results, ["a", "b", "not yet"], [])
    assert (first.last.mean, other.last.mean, other.runs, other.diverged) == (51.0, 60.0, 1, 1)
    assert (other.difference.mean, other.difference.pairs, first.difference) == (10.0, 1, None)
    assert sentence(first, "a") == "a: top-1 51.00 ± 1.41; the others are compared with it."
    assert sentence(other, "a") == (
        "b: top-1 60.00, not told apart from a by 1 seed (+10.00). 1 of 2 runs diverged and are left out."
    )
    none = summarise([results[0], results[3]], ["a", "b"], [])[1]
    assert sentence(none, "a") == "b: no run has finished. 1 of 1 runs diverged and are left out."


@pytest.mark.parametrize(
    "tops, words",
    [
        ((60.0, 61.0, 62.1), "above a (+10.03, +9.89 to +10.18, 3 seeds)"),
        ((40.0, 41.0, 42.1), "below a (-9.97, -10.11 to -9.82, 3 seeds)"),
        ((40.0, 61.0, 42.1), "not told apart from a by 3 seeds"),
    ],
)
def test_a_sentence_for_each_arm(tops, words):
    results = [result("a", seed, 50.0 + seed) for seed in range(3)]
    results += [result("b", seed, top1) for seed, top1 in enumerate(tops)]
    assert words in sentence(summarise(results, ["a", "b"], [])[1], "a")


def test_the_table_of_runs_comes_back_as_it_was(tmp_path):
    results = [
        result("a", 0, 100 / 3, sizes={8: 1 / 3}),
        result("b, c", 1, 50.0, "diverged", multiply_adds=math.nan, sizes={}),
    ]
    write_runs(tmp_path / "study.csv", results, [8])
    first, second = read_runs(tmp_path / "study.csv")
    assert first == results[0] and second.arm == "b, c" and math.isnan(second.multiply_adds)
    (tmp_path / "study.csv").write_text("arm,seed\nx,1\n")
    with pytest.raises(ValueError, match="is not the table of a study"):
        read_runs(tmp_path / "study.csv")


def test_machine_settings_may_change_and_recipes_may_not(tmp_path):
    content = {"arms": {"a": {"lr": 0.1}, "b": {"lr": 0.2}}, "seeds": [0], **QUICK}

    def description(**changes):
        study = study_from_mapping({**content, **changes})
        return describe_study(study, study.configs(), {"training": 10})

    write_record(tmp_path, description())
    assert check_record(tmp_path, description(workers=3, threads=1)) is not None
    for changes, words in (
        ({"smoothing": 0.3}, "holds another study: smoothing 0.1 -> 0.3; use"),
        ({"arms": {"a": {"lr": 0.3}, "b": {"lr": 0.2}}}, "study: arm 'a' lr 0.1 -> 0.3; use"),
        ({"arms": {"b": {"lr": 0.2}, "a": {"lr": 0.1}}}, "order of the arms: arm 'b', arm 'a'; use"),
        ({"arms": {"a": {"lr": 0.1}, "c": {"lr": 0.2}}}, "arm 'b' is gone, arm 'c' is new; use"),
    ):
        with pytest.raises(ValueError, match=words):
            check_record(tmp_path, description(**changes))
    with pytest.raises(ValueError, match="images .*10.* -> .*11"):
        check_record(tmp_path, {**description(), "images": {"training": 11}})


@pytest.mark.parametrize("arms", ["{a: hgrn_deit_tiny, b: {lr: 0.1}}", "{a: {lr: 0.1}, b: {lr: 0.2}}", "[a, b]", "5"])
def test_a_study_file_of_ones_own_is_no_record(tmp_path, arms):
    (tmp_path / "study.yaml").write_text(f"arms: {arms}\n")
    study = study_from_mapping({"arms": {"a": None, "b": {"lr": 0.1}}})
    with pytest.raises(ValueError, match="study.yaml is not the record of a study; give another --output"):
        check_record(tmp_path, describe_study(study, study.configs(), {"training": 10}))
    assert (tmp_path / "study.yaml").read_text() == f"arms: {arms}\n"


def test_seeds_that_diverged_in_the_first_arm_are_no_pairs():
    results = [result("a", 0, 50.0), result("a", 1, 10.0, "diverged"), result("b", 0, 60.0), result("b", 1, 61.0)]
    other = summarise(results, ["a", "b"], [])[1]
    assert (other.difference.mean, other.difference.pairs, other.runs) == (10.0, 1, 2)


def test_the_table_of_arms_is_empty_where_there_is_no_number(tmp_path):
    results = [result("a", 0, 50.0, sizes={8: 40.0}), result("b", 0, 60.0, multiply_adds=math.nan)]
    write_summary_table(tmp_path / "summary.csv", summarise(results, ["a", "b"], [8]), [8])
    with open(tmp_path / "summary.csv", newline="") as file:
        first, second = csv.DictReader(file)
    assert (first["top1_last"], first["top1_last_std"], first["top1_at_8"]) == ("50", "", "40")
    assert (first["difference"], first["verdict"]) == ("", "")
    # a single seed has an interval without end
    assert (second["difference"], second["difference_low"], second["difference_high"]) == ("10", "", "")
    assert (second["verdict"], second["multiply_adds"], second["top1_at_8"]) == ("not told apart", "", "")
