"""Training as processes that are killed, stopped, restarted and starved."""

import csv
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from launcher import ROOT, Launcher
from safetensors.torch import load_file

from hgrn_vision.train.checkpoint import Checkpoint, read

# mixup, erasing, drop path, repeated augmentation and averaged weights all on: whatever could make two runs differ
TINY = shlex.split(
    "--model-args patch_size=2 embed_dim=16 depth=2 --drop-path 0.3 --mixup 0.8 --cutmix 1 --reprob 0.3 --repeats 3 "
    "--ema 0.9 --batch-size 64 --micro-batch 16 --device cpu"
)


@pytest.fixture(scope="module")
def launch(tmp_path_factory):
    launcher = Launcher(tmp_path_factory.mktemp("processes"))
    yield launcher
    launcher.close()


def rows(output: Path) -> list[dict[str, str]]:
    with open(output / "log.csv", newline="") as file:
        return list(csv.DictReader(file))


def column(output: Path, name: str) -> list[float]:
    return [float(row[name]) for row in rows(output)]


def last(output: Path) -> Checkpoint:
    return read(output / "checkpoints" / "last.safetensors")


def assert_same_weights(got: Checkpoint, want: Checkpoint) -> None:
    for ours, theirs in ((got.model, want.model), (got.ema, want.ema)):
        assert ours.keys() == theirs.keys()
        for name, tensor in theirs.items():
            assert torch.equal(ours[name], tensor), f"{name} differs"


def wait_for(condition, process, seconds: float = 900) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"waited {seconds} seconds: {process.output}"
        time.sleep(0.001)


def test_killed_five_times_ends_in_the_same_weights(launch):
    """Between the renames of a save, in a step, between the best and the last checkpoint, in the model's export."""
    arguments = [*TINY, "--epochs", 4, "--epoch-steps", 7, "--save-steps", 2]
    whole, killed = launch.folder / "whole", launch.folder / "killed"
    code, output = launch.run(*arguments, "--output", whole)
    assert code == 0, output
    moments = [
        ("os.replace", "/last.safetensors", 2),
        ("torch.Tensor.backward", "", 18),
        ("os.replace", "/last.safetensors", 2),
        ("os.replace", "/log.csv", 2),
        ("os.replace", "/model", 1),
    ]
    for moment in moments:
        process = launch.start(*arguments, "--output", killed, moment=(signal.SIGKILL, *moment))
        assert process.wait() == -signal.SIGKILL, f"{moment}: {process.output}"
        assert moment is moments[0] or "continuing after step" in process.output, f"{moment}: {process.output}"
    code, output = launch.run(*arguments, "--output", killed)
    assert code == 0, output
    assert_same_weights(last(killed), last(whole))
    for run in (killed, whole):
        best, model = read(run / "checkpoints" / "best.safetensors"), load_file(run / "model" / "model.safetensors")
        assert model.keys() == best.ema.keys()
        assert all(torch.equal(model[name], tensor) for name, tensor in best.ema.items()), run
    same = ("epoch", "step", "lr", "train_loss", "val_loss", "val_top1", "val_top5", "skipped_steps")
    for name in same:
        assert column(killed, name) == column(whole, name), name
    assert column(whole, "step") == [7, 14, 21, 28]


def test_two_ranks_are_one_and_a_run_moves_between_them(launch):
    """One step per epoch, so that every step's loss is a row of the log."""
    arguments = [*TINY, "--epochs", 20, "--epoch-steps", 1, "--eval-images", 33]
    alone, moved = launch.folder / "alone", launch.folder / "moved"
    code, output = launch.run(*arguments, "--output", alone)
    assert code == 0, output

    # each rank has two of the four micro-batches of a step: stopped in the fifth step
    moment = (signal.SIGUSR1, "torch.Tensor.backward", "", 10)
    ranks = launch.start_ranks(2, *arguments, "--output", moved, moments={1: moment})
    assert [rank.wait() for rank in ranks] == [0, 0], ranks[0].output
    assert "stopped at step 5" in ranks[0].output and last(moved).progress["updates"] == 5
    # stopped in the fourth step after that
    moment = (signal.SIGINT, "torch.Tensor.backward", "", 14)
    code, output = launch.run(*arguments, "--output", moved, moment=moment)
    assert code == 0 and "stopped at step 9" in output, output
    ranks = launch.start_ranks(2, *arguments, "--output", moved)
    assert [rank.wait() for rank in ranks] == [0, 0], ranks[0].output
    assert column(moved, "step") == list(range(1, 21))
    assert column(moved, "train_loss") == pytest.approx(column(alone, "train_loss"), abs=1e-5)


def test_evaluation_counts_every_image_once_on_any_number_of_ranks(launch):
    """The 359 held-out images cannot be split evenly between two ranks, and the figures agree to the last digit."""
    run = launch.folder / "scored"
    code, output = launch.run(*TINY, "--epochs", 1, "--epoch-steps", 2, "--output", run)
    assert code == 0, output
    code, alone = launch.run("--eval", run)
    assert code == 0, alone
    ranks = launch.start_ranks(2, "--eval", run)
    assert [rank.wait() for rank in ranks] == [0, 0]
    assert ranks[0].output == alone
    assert "359 images, 0 unreadable" in alone
    assert f"top-1 {column(run, 'val_top1')[0]:.3f}" in alone
    assert ranks[1].output == ""


def test_torchrun_restarts_a_killed_worker(launch):
    output = launch.folder / "restarted"
    arguments = [*TINY, "--epochs", 4, "--epoch-steps", 5, "--save-steps", 2, "--output", output]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", 2, "--max-restarts", 1]
    program = launch.folder / "killed_once.py"
    program.write_text(
        f"import os, runpy, signal, sys\n"
        f"sys.path[:0] = {[str(ROOT), str(ROOT / 'tests' / 'helpers')]}\n"
        f"from launcher import arm\n"
        f"if os.environ['RANK'] == '1' and os.environ['TORCHELASTIC_RESTART_COUNT'] == '0':\n"
        f"    arm(signal.SIGKILL, 'torch.Tensor.backward', '', 24)\n"
        f"runpy.run_path({str(ROOT / 'train_imagenet.py')!r}, run_name='__main__')\n"
    )
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", program, *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    log = launch.folder / "torchrun.txt"
    with open(log, "w") as stream:
        agent = subprocess.Popen([str(part) for part in command], stdout=stream, stderr=stream, env=environment)
    try:
        assert agent.wait(timeout=900) == 0, log.read_text()
    finally:
        agent.terminate()
    assert "continuing after step" in log.read_text()
    assert column(output, "step") == [5, 10, 15, 20]


def test_a_rank_that_dies_is_named(launch):
    arguments = [*TINY, "--epochs", 3, "--epoch-steps", 2, "--output", launch.folder / "dying"]
    ranks = launch.start_ranks(2, *arguments, moments={1: (signal.SIGKILL, "torch.Tensor.backward", "", 6)})
    assert ranks[1].wait() == -signal.SIGKILL, ranks[1].output
    assert ranks[0].wait() == 1
    line = ranks[0].output.splitlines()[-1]
    assert line.startswith("hgrn-vision train: rank 0 lost another rank in step 3"), ranks[0].output
    assert "Traceback" not in ranks[0].output


@pytest.mark.machine
def test_a_rank_that_hangs_is_named(launch):
    arguments = [*TINY, "--epochs", 200, "--timeout-minutes", 0.05, "--output", launch.folder / "hanging"]
    ranks = launch.start_ranks(2, *arguments)
    wait_for(lambda: "epoch 1/200" in ranks[0].output, ranks[0])
    ranks[1].send(signal.SIGSTOP)
    assert ranks[0].wait() == 1
    line = ranks[0].output.splitlines()[-1]
    assert line.startswith("hgrn-vision train: rank 0") and "Ranks 1 failed" in line, ranks[0].output
    assert "Traceback" not in ranks[0].output
    ranks[1].send(signal.SIGKILL)
    ranks[1].wait()


def test_full_disk_keeps_the_last_checkpoint(launch):
    output = launch.folder / "full"
    arguments = [*TINY, "--epochs", 2, "--epoch-steps", 4, "--output", output]
    code, said = launch.run(*arguments, file_limit=100_000)
    assert code == 2, said
    assert "cannot write" in said and "Traceback" not in said
    # the first checkpoint has no optimizer state yet and fits under the limit
    assert last(output).progress["updates"] == 0
    assert os.listdir(output / "checkpoints") == ["last.safetensors"]
    code, said = launch.run(*arguments)
    assert code == 0, said
    assert column(output, "step") == [4, 8]


def test_divergence_ends_with_code_3(launch):
    output = launch.folder / "diverged"
    arguments = [*TINY, "--epochs", 2, "--epoch-steps", 8, "--output", output]
    code, said = launch.run(*arguments, "--lr", 1e30, "--warmup-epochs", 0)
    assert code == 3, said
    assert said.count("steps in a row had a non-finite loss") == 3 and "Traceback" not in said
    state = last(output)
    assert state.progress["rollbacks"] == 3
    assert all(torch.isfinite(tensor).all() for tensor in state.model.values())
    assert launch.run(*arguments, "--lr", 1e30, "--warmup-epochs", 0)[0] == 3
    code, said = launch.run(*arguments, "--lr", 1e-3, "--warmup-epochs", 0, "--allow-change")
    assert code == 0, said
    assert "lr 1e+30 -> 0.001" in said
