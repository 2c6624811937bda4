"""hgrn-vision compare: a study from its command line to its tables, killed on the way, and what it refuses."""

import csv
import signal
from types import SimpleNamespace

import pytest
import torch
import yaml
from launcher import Launcher
from PIL import Image

from hgrn_vision import cli
from hgrn_vision.commands import _study_display, compare
from hgrn_vision.inference.pretrained import load_model

TINY = ["--model-args", "patch_size=2", "embed_dim=16", "depth=2", "--epochs", "2", "--epoch-steps", "2"]
TINY += ["--eval-images", "64", "--batch-size", "32", "--micro-batch", "32", "--device", "cpu", "--workers", "0"]
COSTS = (("cheap", 1e6), ("dear", 3e6))
ARMS = ["--arms", "hgrn_deit_tiny", "no bound=hgrn_deit_tiny,lower_bound=none"]


def rows(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def call(capsys, *argv):
    try:
        code = cli.main(["compare", *map(str, argv)])
    except SystemExit as stop:
        code = stop.code
    return code, *capsys.readouterr()


@pytest.fixture(scope="module")
def launcher(tmp_path_factory):
    launcher = Launcher(tmp_path_factory.mktemp("processes"), "compare")
    yield launcher
    launcher.close()


@pytest.fixture(scope="module")
def study(launcher):
    """A study of two arms and two seeds that was killed in its second run, stopped in its third, and then finished."""
    command = [*ARMS, "--seeds", "0", "1", *TINY, "--sizes", "8", "12", "--output", "study"]
    folder = launcher.folder / "study"
    # SIGKILL, which cannot be caught, arrives while the second run saves its first epoch
    kill = (signal.SIGKILL, "os.replace", "no_bound/seed0/checkpoints/last.safetensors", 2)
    killed = launcher.run(*command, moment=kill)
    after_kill = {path.name: path.read_text() for path in folder.glob("*.csv")}
    stop = (signal.SIGTERM, "os.replace", "hgrn_deit_tiny/seed1/checkpoints/last.safetensors", 2)
    stopped = launcher.run(*command, moment=stop)
    return folder, killed, after_kill, stopped, launcher.run(*command)


def test_a_study_that_is_killed_ends_in_its_tables(study):
    folder, killed, after_kill, stopped, finished = study
    assert killed[0] == -signal.SIGKILL
    # the finished run is in the tables, the killed one is not
    assert [line.split(",")[:2] for line in after_kill["study.csv"].splitlines()[1:]] == [["hgrn_deit_tiny", "0"]]
    assert stopped[0] == 0 and "stopped; the same command continues" in stopped[1]
    assert "1 of 4 runs are already finished" in stopped[1] and "2 of 4 runs are already finished" in finished[1]
    assert finished[0] == 0, finished[1]
    runs = rows(folder / "study.csv")
    assert all(
        float(row[name]) > 0 for row in runs for name in ("images_per_second", "peak_memory", "training_seconds")
    )
    assert all((row["status"], row["epochs"], row["steps"]) == ("finished", "2", "4") for row in runs)
    assert [(row["arm"], row["seed"]) for row in runs] == [
        (arm, seed) for seed in "01" for arm in ("hgrn_deit_tiny", "no bound")
    ]
    assert all(row["top1_at_8"] == row["top1_last"] and row["top1_at_12"] for row in runs)


def test_each_run_is_an_ordinary_run_folder(study):
    folder = study[0]
    for row in rows(folder / "study.csv"):
        run = folder / row["folder"]
        assert {path.name for path in run.iterdir()} == {
            "config.yaml",
            "log.csv",
            "checkpoints",
            "model",
            "report.html",
        }
        settings = yaml.safe_load((run / "config.yaml").read_text())["recipe"]
        assert settings["seed"] == int(row["seed"])
        bound = settings["model_args"].get("lower_bound")
        assert bound == ("none" if row["arm"] == "no bound" else None)
        log = rows(run / "log.csv")
        assert log[-1]["val_top1"] == row["top1_last"]
        best = max(log, key=lambda epoch: float(epoch["val_top1"]))
        assert (best["val_top1"], best["epoch"]) == (row["top1_best"], row["best_epoch"])


def test_the_summary_follows_from_the_runs(study):
    folder = study[0]
    top1 = {(row["arm"], row["seed"]): float(row["top1_last"]) for row in rows(folder / "study.csv")}
    first, other = rows(folder / "summary.csv")
    a, b = (top1["no bound", seed] - top1["hgrn_deit_tiny", seed] for seed in "01")
    # of two differences the standard deviation is |a - b| / sqrt(2), so t(0.975, 1) s / sqrt(2) is
    half = 12.7062 * abs(a - b) / 2
    assert float(other["difference"]) == pytest.approx((a + b) / 2, rel=1e-4)
    assert float(other["difference_low"]) == pytest.approx((a + b) / 2 - half, rel=1e-4)
    assert first["difference"] == "" and first["runs"] == "2" and first["verdict"] == ""
    assert float(first["top1_last"]) == pytest.approx((top1["hgrn_deit_tiny", "0"] + top1["hgrn_deit_tiny", "1"]) / 2)
    # 2 blocks have a lower bound of 16 channels each
    assert int(first["parameters"]) - int(other["parameters"]) == 2 * 16
    page = (folder / "report.html").read_text()
    assert "by 2 seeds" in page and "chosen on the held-out images themselves" in page
    assert "2 of 4 runs are done" not in page


def test_a_changed_study_is_refused_with_the_differences(study, capsys):
    folder = study[0]
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    code, out, err = call(capsys, *ARMS, "--seeds", "0", "2", *TINY, "--lr", "0.1", "--output", folder)
    assert (code, out) == (2, "") and err.count("\n") == 1
    assert "seeds [0, 1] -> [0, 2], sizes [8, 12] -> None, lr 0.002 -> 0.1" in err
    code, out, err = call(capsys, "--arms", "hgrn_deit_tiny", "no bound=hgrn_deit_tiny", *TINY, "--output", folder)
    assert code == 2 and "arm 'no bound' model_args" in err
    assert before == {path: path.stat().st_mtime_ns for path in folder.rglob("*")}


def test_the_record_of_a_study_is_a_study(study, capsys):
    folder = study[0]
    code, out, _ = call(capsys, folder / "study.yaml", "--output", folder, "--workers", "1")
    assert code == 0 and "run 1 of" not in out and "not told apart" in out


@pytest.mark.parametrize(
    "argv, words",
    [
        (["--arms", "hgrn_deit_tiny"], "at least two arms, got 1"),
        (["--arms", "hgrn_deit_tiny", "hgrn_deit_tinny"], "timm has no model 'hgrn_deit_tinny'"),
        (["--arms", "a=hgrn_deit_tiny", "a=deit_tiny_patch16_224"], "two arms are named 'a'"),
        (["--arms", "a b=hgrn_deit_tiny", "a_b=hgrn_deit_tiny"], "two arms would share the folder 'a_b'"),
        (["--arms", "a=hgrn_deit_tiny,depth", "hgrn_deit_tiny"], "expected KEY=VALUE after the model, got 'depth'"),
        (["--arms", "a=hgrn_deit_tiny,lr=big", "hgrn_deit_tiny"], "setting lr: 'big' is not a number"),
        (["--arms", "a=hgrn_deit_tiny,seed=3", "hgrn_deit_tiny"], "cannot have its own seed"),
        (["--arms", "a=hgrn_deit_tiny,width=3", "hgrn_deit_tiny"], "arm 'a': cannot create model hgrn_deit_tiny"),
        (["--arms", "a=hgrn_deit_tiny,lower_bound=up", "hgrn_deit_tiny"], "lower_bound must be one of"),
        (["--arms", "hgrn_deit_tiny", "hgrn_deit_tiny,patch_size=0"], "cannot create model hgrn_deit_tiny: integer"),
        ([*ARMS, "--seeds", "1", "1"], "two seeds are 1"),
        ([*ARMS, "--seeds"], "argument --seeds: expected at least one argument"),
        ([*ARMS, "--sizes", "0"], "'0' is not a positive integer"),
        ([*ARMS, "--minutes-per-run", "-1"], "minutes_per_run must not be negative"),
        ([*ARMS, "--minutes-per-run", "inf"], "minutes_per_run must be at most 1,000,000, got inf"),
        ([*ARMS, "--minutes-per-run", "1", "--first-sizes", "6x1"], "first_sizes counts epochs"),
        ([*ARMS, "--batch-size", "4096", "--micro-batch", "32"], "fewer than one batch of 4096"),
        ([*ARMS, "--modules", "nowhere.py"], "cannot import nowhere.py"),
        (["missing-folder", *ARMS], "no such file or folder: missing-folder"),
        (["a.yaml", "b.yaml", *ARMS], "at most one study file"),
    ],
)
def test_bad_input_is_one_line_before_anything_is_trained(argv, words, capsys, tmp_path):
    settings = [] if "--batch-size" in argv else TINY
    code, out, err = call(capsys, *argv, *settings, "--output", tmp_path / "study")
    assert (code, out) == (2, "") and words in err and err.count("\n") == 1
    assert not (tmp_path / "study").exists()


def test_a_study_of_several_processes_is_refused(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    code, out, err = call(capsys, *ARMS, *TINY, "--output", tmp_path / "study")
    assert (code, out) == (2, "") and "a study runs in one process" in err and err.count("\n") == 1
    assert not (tmp_path / "study").exists()


def test_folders_that_hold_something_else_are_left_alone(capsys, tmp_path):
    (tmp_path / "note.txt").write_text("mine")
    code, _, err = call(capsys, *ARMS, *TINY, "--output", tmp_path)
    assert code == 2 and "is not empty and holds no study" in err
    (tmp_path / "study.yaml").write_text("data: digits\n")
    assert "is not the record of a study" in call(capsys, *ARMS, *TINY, "--output", tmp_path)[2]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["note.txt", "study.yaml"]


def test_a_folder_without_classes(capsys, tmp_path):
    (tmp_path / "photos" / "train").mkdir(parents=True)
    code, _, err = call(capsys, tmp_path / "photos", *ARMS, "--holdout", "0.2", "--output", tmp_path / "study")
    assert code == 2 and err.count("\n") == 1 and not (tmp_path / "study").exists()


def test_the_plan_is_shown_and_nothing_is_written(capsys, tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text(
        yaml.safe_dump(
            {"epochs": 3, "epoch_steps": 4, "arms": {"small": {"depth": 2}, "deep": {"depth": 4, "mean": [0.5] * 3}}}
        )
    )
    code, out, _ = call(capsys, file, "--seeds", "5", "--epochs", "2", "--plan", "--output", tmp_path / "study")
    assert code == 0 and "2 arms, 1 seeds (5)" in out
    lines = {line.split()[0]: line.split() for line in out.splitlines()}
    assert lines["small"][-1] == lines["deep"][-1] == "8"
    assert "deep: mean 0.5 0.5 0.5, std 0.229 0.224 0.225; small: mean 0.485" in out
    assert not (tmp_path / "study").exists()


def test_flags_win_over_the_file(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text(yaml.safe_dump({"data": "a", "lr": 0.5, "arms": ["hgrn_deit_tiny", "x=lr=0.1"], "output": "there"}))
    parser = cli.build_parser("compare")
    study, output = compare.resolve(parser.parse_args(["compare", str(file), "b", "--lr", "0.7", "--seeds", "3"]))
    assert output == "there" and study.seeds == (3,) and study.settings == {"data": "b", "lr": 0.7}
    assert [arm.settings for arm in study.arms] == [{"model": "hgrn_deit_tiny"}, {"lr": 0.1}]


def test_pixel_sequences_go_through_every_command(tmp_path, capsys):
    """One grey token per pixel, from the data to a file that runs without this package."""
    argv = ["--arms", "hgrn_deit_tiny", "one way=bidirectional=false", "--seeds", "0", "--sequence", "--epochs", "1"]
    small = ["--epoch-steps", "1", "--eval-images", "32", "--img-size", "8", "--model-args", "embed_dim=16", "depth=2"]
    code, out, _ = call(capsys, *argv, *small, "--device", "cpu", "--output", tmp_path / "study")
    assert code == 0 and "one token each, in raster order" in (tmp_path / "study" / "report.html").read_text()
    run = tmp_path / "study" / "hgrn_deit_tiny" / "seed0"
    model = load_model(str(run))
    assert model.spec.input_size == (1, 8, 8) and len(model.spec.mean) == 1
    assert model.model.forward_features(torch.zeros(1, 1, 8, 8)).shape == (1, 64, 16)
    image = tmp_path / "colour.png"
    Image.new("RGB", (8, 8), (200, 30, 60)).save(image)
    assert cli.main(["predict", str(run), str(image), "--csv", "-"]) == 0
    assert "colour.png" in capsys.readouterr().out
    assert cli.main(["evaluate", str(run), "digits", "--holdout", "0.1"]) == 0
    assert "top1" in capsys.readouterr().out
    file = tmp_path / "model.torchscript"
    assert cli.main(["export", str(run), "--format", "torchscript", "--output", str(file)]) == 0
    exported = torch.jit.load(file)
    pixels = model.prepare(Image.open(image))[None]
    with torch.no_grad():
        assert torch.allclose(exported(pixels), model.model(pixels), atol=1e-4)


def test_time_left_counts_every_run_of_the_study(capsys, monkeypatch):
    """Arms that have run count at their own pace, others by their multiply-adds."""
    arms = [SimpleNamespace(arm=SimpleNamespace(name=name), steps=10, multiply_adds=cost) for name, cost in COSTS]
    for arm in arms:
        arm.config = SimpleNamespace(batch_size=2)
    plan = SimpleNamespace(arms=arms, runs=[(arm, seed) for seed in (0, 1) for arm in arms])
    now = iter([0.0, 4.0])
    monkeypatch.setattr(_study_display.time, "monotonic", lambda: next(now))
    monkeypatch.setattr(_study_display, "SECONDS_BETWEEN_LINES", 0)
    display = _study_display.StudyDisplay()
    display.opened(plan, [])
    display.run_began(1, arms[0], 0)
    display.began(SimpleNamespace(progress=SimpleNamespace(updates=0)))
    display.stepped(SimpleNamespace(updates=4), 0.5, 0.1)
    # a step took 1 second: 6 more here, 10 with the next seed, and 2 x 10 steps of three times the cost
    left = 6 + 10 + 2 * 10 * 3
    assert f"run 1 of 4 (cheap, seed 0), loss 0.500, 01:{left - 60:02} left for the study; step 4 of 10" in (
        capsys.readouterr().out
    )
    display.close()
