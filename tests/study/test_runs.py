"""The runs of a study: divergence as a result, minutes instead of steps, other image sizes."""

import pytest
from training import SMALL, digits

from hgrn_vision.study import runs
from hgrn_vision.study.definition import study_from_mapping
from hgrn_vision.study.folder import (
    read_runs,
)
from hgrn_vision.study.plan import make_plan
from hgrn_vision.study.runs import StudyObserver, run_study
from hgrn_vision.train.evaluation import WrongSize, score
from hgrn_vision.train.run import train

QUICK = {"epochs": 2, "epoch_steps": 2, "batch_size": 32, "eval_images": 64, "device": "cpu", "model_args": SMALL}


class Events(StudyObserver):
    def __init__(self):
        self.seen = []

    def run_began(self, number, arm, seed):
        self.seen.append((number, arm.arm.name, seed))

    def run_ended(self, number, result):
        self.seen.append(result.status)


@pytest.fixture
def no_reports(monkeypatch):
    """Runs without their own reports, which take longer than so few steps."""
    monkeypatch.setattr("hgrn_vision.train.run.write_summary", lambda *args, **kwargs: None)


def test_a_run_that_diverges_is_a_result(tmp_path, no_reports):
    wild = {"lr": 1e38, "warmup_lr": 1e38, "clip_grad": 0.0, "opt": "sgd"}
    # one gives up after going back to its checkpoints, the other is over before that, its weights no longer numbers
    arms = {"calm": None, "wild": {**wild, "epoch_steps": 12}, "short": wild}
    content = {**QUICK, "recipe": "digits", "arms": arms, "seeds": [0], "micro_batch": 32, "warmup_epochs": 0.0}
    plan, events = make_plan(study_from_mapping(content)), Events()
    outcome = run_study(plan, tmp_path / "study", "the command", events)
    assert outcome.finished and [event for event in events.seen if isinstance(event, str)] == [
        "finished",
        "diverged",
        "diverged",
    ]
    calm, gave_up, short = read_runs(tmp_path / "study" / "study.csv")
    assert (calm.epochs, gave_up.epochs, short.epochs) == (2, 0, 2)
    assert [(arm.runs, arm.diverged) for arm in outcome.summaries] == [(1, 0), (0, 1), (0, 1)]
    page = (tmp_path / "study" / "report.html").read_text()
    assert "wild: no run has finished. 1 of 1 runs diverged" in page and "the command" in page
    # a second process is refused while the first works
    fcntl = pytest.importorskip("fcntl")
    with open(tmp_path / "study" / ".lock") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(ValueError, match="another process is working on the study"):
            run_study(plan, tmp_path / "study", "")
    # what diverged is not tried again
    again = Events()
    assert run_study(plan, tmp_path / "study", "", again).finished and again.seen == []


def test_a_full_disk_loses_no_finished_result(tmp_path, monkeypatch, no_reports):
    content = {**QUICK, "recipe": "digits", "arms": {"a": None, "b": {"depth": 1}}, "seeds": [0], "epochs": 1}
    plan = make_plan(study_from_mapping(content))
    original = runs.train

    def full(config, folder, *args, **kwargs):
        if "/b/" in str(folder):
            raise OSError(28, "No space left on device")
        return original(config, folder, *args, **kwargs)

    monkeypatch.setattr(runs, "train", full)
    with pytest.raises(OSError, match="No space left"):
        run_study(plan, tmp_path / "study", "")
    (kept,) = read_runs(tmp_path / "study" / "study.csv")
    assert kept.arm == "a" and "1 of 2 runs are done" in (tmp_path / "study" / "report.html").read_text()
    monkeypatch.setattr(runs, "train", original)
    events = Events()
    assert run_study(plan, tmp_path / "study", "", events).finished and events.seen[0] == (2, "b", 0)


def test_equal_minutes_give_each_arm_its_own_steps(tmp_path, monkeypatch, no_reports):
    monkeypatch.setattr(runs, "time_steps", lambda configs: {"a": 0.5, "b": 1.0})
    arms = {"a": None, "b": {"depth": 1, "mean": [0.5] * 3}}
    content = {**QUICK, "recipe": "digits", "arms": arms, "seeds": [0], "epoch_steps": None}
    plan = make_plan(study_from_mapping({**content, "minutes_per_run": 0.1}))
    assert run_study(plan, tmp_path / "study", "").finished
    assert [run.steps for run in read_runs(tmp_path / "study" / "study.csv")] == [12, 6]
    page = (tmp_path / "study" / "report.html").read_text()
    assert "b: mean 0.5 0.5 0.5, std" in page
    assert "0.1 minutes of training" in page and "minutes of training</text>" in page
    # a later start keeps to the pace that was measured first
    monkeypatch.setattr(runs, "time_steps", None)
    assert run_study(plan, tmp_path / "study", "").finished


def test_a_stop_while_steps_are_timed_leaves_no_study(tmp_path, monkeypatch):
    monkeypatch.setattr(runs, "time_steps", lambda configs: None)
    content = {**QUICK, "recipe": "digits", "arms": {"a": None, "b": {"depth": 1}}, "minutes_per_run": 1}
    assert not run_study(make_plan(study_from_mapping(content)), tmp_path / "study", "").finished
    assert not (tmp_path / "study").exists()


def test_a_study_is_recorded_once_its_runs_are_planned(tmp_path, monkeypatch):
    monkeypatch.setattr(runs, "time_steps", lambda configs: {"a": 0.5, "b": 0.0})
    content = {**QUICK, "recipe": "digits", "arms": {"a": None, "b": {"depth": 1}}, "minutes_per_run": 1}
    with pytest.raises(ZeroDivisionError):
        run_study(make_plan(study_from_mapping(content)), tmp_path / "study", "")
    assert not (tmp_path / "study" / "study.yaml").exists()


def timed_study():
    content = {**QUICK, "recipe": "digits", "arms": {"a": None, "b": {"depth": 1}}, "minutes_per_run": 1}
    return make_plan(study_from_mapping(content))


def test_a_second_process_is_refused_from_the_first_step_on(tmp_path, monkeypatch):
    pytest.importorskip("fcntl")
    plan, folder, seen = timed_study(), tmp_path / "study", []

    def second(*_):
        with pytest.raises(ValueError, match="another process is working on the study in .*study$"):
            run_study(plan, folder, "")
        seen.append(sorted(path.name for path in folder.iterdir()))

    def time_steps(configs):
        second()
        return {"a": 60.0, "b": 60.0}

    monkeypatch.setattr(runs, "time_steps", time_steps)
    # study.yaml is replaced in between, the lock is not
    monkeypatch.setattr(runs, "_run_all", second)
    run_study(plan, folder, "")
    assert seen == [[".lock"], [".lock", "study.yaml"]]


def test_a_killed_process_leaves_no_lock(tmp_path, monkeypatch):
    monkeypatch.setattr(runs, "time_steps", lambda configs: {"a": 60.0, "b": 60.0})
    monkeypatch.setattr(runs, "_run_all", lambda *_: "runs")
    (tmp_path / "study").mkdir()
    (tmp_path / "study" / ".lock").touch()
    assert run_study(timed_study(), tmp_path / "study", "") == "runs"


def test_a_folder_in_which_no_study_began_is_as_it_was(tmp_path, monkeypatch):
    monkeypatch.setattr(runs, "time_steps", lambda configs: None)
    (tmp_path / "empty").mkdir()
    assert not run_study(timed_study(), tmp_path / "empty", "").finished
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "note.txt").touch()
    with pytest.raises(ValueError, match="is not empty and holds no study"):
        run_study(timed_study(), tmp_path / "mine", "")
    assert sorted(tmp_path.rglob("*")) == [tmp_path / "empty", tmp_path / "mine", tmp_path / "mine" / "note.txt"]


def test_a_size_that_a_model_cannot_take_has_no_point(tmp_path, monkeypatch, no_reports):
    train(digits(epochs=1), tmp_path / "run")
    found = runs._score_sizes(tmp_path / "run", digits(), (8, 12))
    assert found.keys() == {8, 12} and found[8] == score(tmp_path / "run", {}).evaluation.top1

    def refuse(model, side):
        raise WrongSize("too large")

    monkeypatch.setattr("hgrn_vision.train.evaluation.fit_size", refuse)
    assert runs._score_sizes(tmp_path / "run", digits(), (8, 12)).keys() == {8}
