"""Studies: what an arm is, what arms share, divergence as a result, minutes instead of steps, other image sizes."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import timm
import torch
from training import SMALL, digits

from hgrn_vision.train import step_time, study_runs
from hgrn_vision.train.build import build_model
from hgrn_vision.train.cost import multiply_adds
from hgrn_vision.train.evaluation import WrongSize, fit_size, score
from hgrn_vision.train.memory import forget_peak, peak_memory
from hgrn_vision.train.recipes import resolve
from hgrn_vision.train.run import train
from hgrn_vision.train.step_time import fit_minutes, time_steps
from hgrn_vision.train.study import Arm, import_modules, parse_arm, read_study, study_from_mapping
from hgrn_vision.train.study_folder import (
    RunResult,
    check_record,
    describe_study,
    read_runs,
    summarise,
    write_record,
    write_runs,
)
from hgrn_vision.train.study_plan import make_plan
from hgrn_vision.train.study_report import sentence
from hgrn_vision.train.study_runs import StudyObserver, run_study

QUICK = {"epochs": 2, "epoch_steps": 2, "batch_size": 32, "eval_images": 64, "device": "cpu", "model_args": SMALL}


@pytest.mark.parametrize(
    "text, name, settings",
    [
        ("hgrn_deit_tiny", "hgrn_deit_tiny", {"model": "hgrn_deit_tiny"}),
        (
            "no bound=hgrn_deit_tiny,lower_bound=none",
            "no bound",
            {"model": "hgrn_deit_tiny", "model_args": {"lower_bound": "none"}},
        ),
        # settings of train and arguments of the constructor are told apart by name
        (
            "deep=hgrn_deit_tiny,depth=4,lr=1e-3,eps=1e-6,betas=[0.8,0.9],freeze=2,img_size=none",
            "deep",
            {
                "model": "hgrn_deit_tiny",
                "lr": 1e-3,
                "betas": (0.8, 0.9),
                "freeze": "2",
                "img_size": None,
                "model_args": {"depth": 4, "eps": 1e-6},
            },
        ),
        ("fast=lr=0.01,epochs=3", "fast", {"lr": 0.01, "epochs": 3}),
        ("lr=0.01", "lr=0.01", {"lr": 0.01}),
    ],
)
def test_an_arm_as_typed(text, name, settings):
    assert parse_arm(text) == Arm(name, settings)


def test_a_plan_says_where_arms_normalize_pixels_differently():
    arms = {name: {"model": f"{name}_tiny_patch16_224", "num_heads": 1} for name in ("deit", "vit")}
    settings = {"recipe": "digits", **QUICK, "arms": arms}
    said = make_plan(study_from_mapping(settings)).unequal_pixels
    assert said.endswith("deit: mean 0.485 0.456 0.406, std 0.229 0.224 0.225; vit: mean 0.5 0.5 0.5, std 0.5 0.5 0.5.")
    assert make_plan(study_from_mapping({**settings, "mean": [0.5] * 3, "std": [0.25] * 3})).unequal_pixels == ""


def test_what_an_arm_does_not_name_is_equal():
    study = study_from_mapping(
        {
            "lr": 0.5,
            "model_args": {"patch_size": 2, "depth": 3},
            "arms": {"a": None, "b": {"model": "resnet18", "patch_size": None, "depth": None, "epochs": 7}},
        }
    )
    a, b = study.configs().values()
    assert (a.model, a.model_args, b.model, b.model_args) == (
        "hgrn_deit_tiny",
        {"patch_size": 2, "depth": 3},
        "resnet18",
        {},
    )
    assert (
        replace(b, model=a.model, model_args=a.model_args, epochs=a.epochs)
        == a
        == replace(resolve({"lr": 0.5}), model_args={"patch_size": 2, "depth": 3})
    )


@pytest.mark.parametrize(
    "content, words",
    [
        ({"seeds": []}, "at least one seed"),
        ({"seeds": 3}, "seeds must be a list of whole numbers, got 3"),
        ({"sizes": [0]}, "at least 1 pixel"),
        ({"seed": 3}, "give --seeds instead"),
        ({"minutes_per_run": "long"}, "must be a number"),
        ({"arms": "hgrn_deit_tiny"}, "arms must be a list"),
        ({"arms": {"a": 3, "b": None}}, "arm 'a' must be a model name or a mapping of settings, got 3"),
        ({"learning_rate": 3}, "unknown setting 'learning_rate'"),
        ({"photos": ["x"]}, "needs labels"),
    ],
)
def test_studies_that_are_refused(content, words):
    with pytest.raises(ValueError, match=words):
        study_from_mapping({"arms": {"a": None, "b": None}, **content})


def test_pixel_sequences_need_a_size():
    content = {"arms": {"a": None, "b": None}, "data": "photos", "sequence": True}
    with pytest.raises(ValueError, match="needs --img-size"):
        study_from_mapping(content).configs()
    config = study_from_mapping({**content, "img_size": 32}).configs()["a"]
    assert config.model_args == {"patch_size": 1, "in_chans": 1}


def test_models_of_ones_own(tmp_path):
    (tmp_path / "own_models_of_a_test.py").write_text(
        "from timm.models import register_model\nfrom timm.models.resnet import resnet18\n\n"
        "@register_model\ndef my_resnet(pretrained=False, **kwargs):\n    return resnet18(**kwargs)\n"
    )
    file = tmp_path / "study.yaml"
    file.write_text("modules: [own_models_of_a_test.py]\narms: {a: my_resnet, b: resnet18}\n")
    study = study_from_mapping(read_study(file))
    with pytest.raises(ValueError, match="timm has no model 'my_resnet'"):
        study.configs()
    import_modules(study.modules)
    assert study.configs()["a"].model == "my_resnet"
    (tmp_path / "broken_models_of_a_test.py").write_text("def (")
    with pytest.raises(ValueError, match="cannot import"):
        import_modules([str(tmp_path / "broken_models_of_a_test.py")])


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


class Events(StudyObserver):
    def __init__(self):
        self.seen = []

    def run_began(self, number, arm, seed):
        self.seen.append((number, arm.arm.name, seed))

    def run_ended(self, number, result):
        self.seen.append(result.status)


@pytest.fixture
def no_reports(monkeypatch):
    """Skips the reports of the runs, which take longer than these few steps."""
    monkeypatch.setattr("hgrn_vision.train.run.write_summary", lambda *args, **kwargs: None)


def test_a_run_that_diverges_is_a_result(tmp_path, no_reports):
    wild = {"lr": 1e38, "warmup_lr": 1e38, "clip_grad": 0.0, "opt": "sgd"}
    # one gives up after going back to its checkpoint; the other ends before that, with weights that are not finite
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
    with open(tmp_path / "study" / "study.yaml") as record:
        fcntl.flock(record, fcntl.LOCK_EX)
        with pytest.raises(ValueError, match="another process is working on the study"):
            run_study(plan, tmp_path / "study", "")
    # a run that diverged is not repeated
    again = Events()
    assert run_study(plan, tmp_path / "study", "", again).finished and again.seen == []


def test_a_full_disk_loses_no_finished_result(tmp_path, monkeypatch, no_reports):
    content = {**QUICK, "recipe": "digits", "arms": {"a": None, "b": {"depth": 1}}, "seeds": [0], "epochs": 1}
    plan = make_plan(study_from_mapping(content))
    original = study_runs.train

    def full(config, folder, *args, **kwargs):
        if "/b/" in str(folder):
            raise OSError(28, "No space left on device")
        return original(config, folder, *args, **kwargs)

    monkeypatch.setattr(study_runs, "train", full)
    with pytest.raises(OSError, match="No space left"):
        run_study(plan, tmp_path / "study", "")
    (kept,) = read_runs(tmp_path / "study" / "study.csv")
    assert kept.arm == "a" and "1 of 2 runs are done" in (tmp_path / "study" / "report.html").read_text()
    monkeypatch.setattr(study_runs, "train", original)
    events = Events()
    assert run_study(plan, tmp_path / "study", "", events).finished and events.seen[0] == (2, "b", 0)


@pytest.mark.parametrize(
    "seconds, epochs, epoch_steps",
    [
        (0.6, 10, 10),  # 100 steps: the 10 epochs of before, 10 steps each
        (0.1, 14, 42),  # 600 steps, at most 44 in an epoch
        (20.0, 3, 1),  # 3 steps
        (90.0, 1, 1),  # at least one
    ],
)
def test_the_schedule_fits_the_minutes(seconds, epochs, epoch_steps):
    fitted = fit_minutes(digits(epochs=10, epoch_steps=None, warmup_epochs=2.0), 1.0, seconds, 44)
    assert (fitted.epochs, fitted.epoch_steps) == (epochs, epoch_steps)
    # warm-up keeps its share of the schedule
    assert fitted.warmup_epochs / fitted.epochs == pytest.approx(0.2)


def test_steps_are_timed_in_turn(monkeypatch):
    clock = iter(range(10**6))
    order = []
    monkeypatch.setattr(step_time.time, "perf_counter", lambda: next(clock) * (10.0 if order[-1] == 64 else 1.0))

    def watched(config, folder, observer):
        order.append(config.batch_size)
        assert (config.save_minutes, config.wandb) == (0.0, "")
        return train(config, folder, observer=observer)

    monkeypatch.setattr(step_time, "train", watched)
    configs = {"slow": digits(epoch_steps=8), "fast": digits(batch_size=32, epoch_steps=8)}
    found = time_steps(configs, seconds=1.0)
    assert order == [64, 32] * step_time.TURNS
    # the run itself reads the clock three times in a step, the stopwatch once
    assert found["slow"] == pytest.approx(10 * found["fast"]) and found["fast"] > 0


def test_equal_minutes_give_each_arm_its_own_steps(tmp_path, monkeypatch, no_reports):
    monkeypatch.setattr(study_runs, "time_steps", lambda configs: {"a": 0.5, "b": 1.0})
    content = {
        **QUICK,
        "recipe": "digits",
        "arms": {"a": None, "b": {"depth": 1, "mean": [0.5] * 3}},
        "seeds": [0],
        "epoch_steps": None,
    }
    plan = make_plan(study_from_mapping({**content, "minutes_per_run": 0.1}))
    assert run_study(plan, tmp_path / "study", "").finished
    assert [run.steps for run in read_runs(tmp_path / "study" / "study.csv")] == [12, 6]
    page = (tmp_path / "study" / "report.html").read_text()
    assert "b: mean 0.5 0.5 0.5, std" in page
    assert "0.1 minutes of training" in page and "minutes of training</text>" in page
    # a later start keeps the pace that was measured first
    monkeypatch.setattr(study_runs, "time_steps", None)
    assert run_study(plan, tmp_path / "study", "").finished


def test_a_stop_while_steps_are_timed_leaves_no_study(tmp_path, monkeypatch):
    monkeypatch.setattr(study_runs, "time_steps", lambda configs: None)
    content = {**QUICK, "recipe": "digits", "arms": {"a": None, "b": {"depth": 1}}, "minutes_per_run": 1}
    assert not run_study(make_plan(study_from_mapping(content)), tmp_path / "study", "").finished
    assert not (tmp_path / "study").exists()


def test_other_sizes_resample_position_embeddings_and_mixers_have_none():
    deit = timm.create_model("deit_tiny_patch16_224", img_size=8, patch_size=2, embed_dim=24, depth=1, num_classes=3)
    weights = {name: tensor.clone() for name, tensor in deit.state_dict().items()}
    fit_size(deit, 16)
    assert deit.pos_embed.shape[1] == 1 + 64 and deit(torch.zeros(1, 3, 16, 16)).shape == (1, 3)
    assert all(torch.equal(tensor, weights[n]) for n, tensor in deit.state_dict().items() if n != "pos_embed")
    hgrn = timm.create_model("hgrn_deit_tiny", img_size=8, **SMALL)
    fit_size(hgrn, 11)
    mixer = timm.create_model("gmlp_ti16_224", img_size=32)
    with pytest.raises(WrongSize, match="cannot take images of 48 pixels"):
        fit_size(mixer, 48)


def test_a_size_that_a_model_cannot_take_has_no_point(tmp_path, monkeypatch, no_reports):
    train(digits(epochs=1), tmp_path / "run")
    found = study_runs._score_sizes(tmp_path / "run", digits(), (8, 12))
    assert found.keys() == {8, 12} and found[8] == score(tmp_path / "run", {}).evaluation.top1

    def refuse(model, side):
        raise WrongSize("too large")

    monkeypatch.setattr("hgrn_vision.train.evaluation.fit_size", refuse)
    assert study_runs._score_sizes(tmp_path / "run", digits(), (8, 12)).keys() == {8}


def test_cost_of_models_that_are_not_ours():
    """A ViT block of width D on T tokens: 12 D^2 T for its matmuls and 2 T^2 D for attention."""
    model = timm.create_model("vit_tiny_patch16_224", img_size=8, patch_size=2, embed_dim=24, depth=2, num_classes=5)
    tokens = 17
    blocks = 2 * (12 * 24 * 24 * tokens + 2 * tokens * tokens * 24)
    assert multiply_adds(model, (3, 8, 8)) == blocks + 16 * 12 * 24 + 24 * 5
    assert next(model.parameters()).device.type == "cpu"


def test_the_recurrence_is_counted_in_all_its_directions():
    config = digits()
    once, rows_and_columns = (
        multiply_adds(build_model(replace(config, model_args={**SMALL, "scan": scan}), 10), (3, 8, 8))
        for scan in ("1d", "2d")
    )
    # two more directions of 6 multiplications each, in 2 blocks of 16 channels, for 16 tokens
    assert rows_and_columns - once == 2 * 6 * 2 * 16 * 16


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux")
def test_the_peak_begins_anew_for_each_run():
    device = torch.device("cpu")
    big = torch.ones(2**26)  # 256 MiB
    held = peak_memory(device)
    del big
    forget_peak(device)
    assert peak_memory(device) < held - 200
