"""How a process of a run deals with the others, tested without others."""

import logging
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from training import digits

from hgrn_vision.cli import main
from hgrn_vision.train import distributed
from hgrn_vision.train.config import TrainConfig
from hgrn_vision.train.distributed import LostRank, World, is_main, start

MISSING = "[Rank 0]: Ranks 1 failed to pass monitoredBarrier in 180000 ms\nException raised from somewhere"


@pytest.fixture
def roll_call(monkeypatch):
    """Records the calls of a barrier between two ranks, and decides how they end."""
    calls = {"asked": [], "error": None}

    def monitored_barrier(**options):
        calls["asked"].append(options)
        if calls["error"]:
            raise RuntimeError(calls["error"])

    monkeypatch.setattr(dist, "monitored_barrier", monitored_barrier)
    return calls


def test_a_rank_that_does_not_come_is_named_in_one_line(roll_call):
    world = World(0, 2, timeout=timedelta(minutes=3), control="control")
    world.meet("step 5")
    roll_call["error"] = MISSING
    with pytest.raises(LostRank) as error:
        world.meet("step 5")
    assert str(error.value) == f"rank 0 waited up to 3 minutes before step 5: {MISSING.splitlines()[0]}"
    asked = {"group": "control", "timeout": timedelta(minutes=3), "wait_all_ranks": True}
    assert roll_call["asked"] == [asked, asked]


def test_alone_nobody_is_waited_for(roll_call):
    World().meet("step 5")
    assert not roll_call["asked"]


@pytest.mark.parametrize("answer", [MISSING, None])
def test_an_error_of_a_dead_peer_becomes_one_that_says_so(roll_call, answer):
    roll_call["error"] = answer
    said = "Connection closed by peer [127.0.0.1]:1234"
    with pytest.raises(LostRank) as error, World(0, 2).watched("step 5"):
        raise RuntimeError(said)
    assert str(error.value) == f"rank 0 lost another rank in step 5: {(answer or said).splitlines()[0]}"


@pytest.mark.parametrize("size, message", [(2, "shapes cannot be multiplied"), (1, "Connection closed by peer")])
def test_other_errors_stay_what_they_are(roll_call, size, message):
    with pytest.raises(RuntimeError, match=message) as error, World(0, size).watched("step 5"):
        raise RuntimeError(message)
    assert type(error.value) is RuntimeError and not roll_call["asked"]


def test_the_timeout_is_the_setting(monkeypatch):
    asked = []

    def rendezvous(address, timeout):
        asked.append(timeout)
        return iter([(dist.HashStore(), 0, 2)])

    monkeypatch.setattr(dist, "rendezvous", rendezvous)
    monkeypatch.setattr(dist, "init_process_group", lambda **options: asked.append(options["timeout"]))
    monkeypatch.setattr(dist, "new_group", lambda backend, timeout: asked.append(timeout))
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    world = distributed.start(TrainConfig(device="cpu", timeout_minutes=7))
    assert (world.rank, world.size) == (0, 2)
    assert [*asked, world.timeout] == [timedelta(minutes=7)] * 4


LAUNCHERS = {
    "torchrun": {"RANK": "{rank}", "LOCAL_RANK": "{rank}", "WORLD_SIZE": "2"},
    "srun": {"SLURM_PROCID": "{rank}", "SLURM_LOCALID": "{rank}", "SLURM_NTASKS": "2"},
    # one torchrun per node: torchrun's own numbers count
    "torchrun in srun": {"RANK": "{rank}", "WORLD_SIZE": "4", "SLURM_PROCID": "1", "SLURM_NTASKS": "2"},
}


@pytest.fixture(params=LAUNCHERS)
def launched(request, monkeypatch):
    """Sets what a launcher tells the process of a rank."""

    def set_rank(rank: int) -> None:
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS"):
            monkeypatch.delenv(name, raising=False)
        for name, value in LAUNCHERS[request.param].items():
            monkeypatch.setenv(name, value.format(rank=rank))

    return set_rank


def test_the_main_process_is_rank_0_of_any_launcher(launched):
    for rank in (0, 1):
        launched(rank)
        assert is_main() == World(rank, 2).main == (rank == 0)


def test_a_process_alone_is_the_main_one(monkeypatch):
    for name in ("WORLD_SIZE", "RANK"):
        monkeypatch.delenv(name, raising=False)
    # as in the batch script of a SLURM job with one task
    monkeypatch.setenv("SLURM_NTASKS", "1")
    assert is_main()


def test_only_the_main_process_prints_warns_and_clears_the_smoke_folder(launched, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    # the command sets signal handlers for the process; the test restores its own
    monkeypatch.setattr(logging.getLogger("hgrn_vision"), "handlers", [])
    kept = tmp_path / "runs" / "smoke-digits-hgrn_deit_tiny" / "kept"
    kept.mkdir(parents=True)
    for rank in (1, 0):
        launched(rank)
        assert main(["train", "--smoke", "--print-config"]) == 0
        assert kept.exists() == (rank == 1)
        logging.getLogger("hgrn_vision").warning("told once")
        said = capsys.readouterr()
        assert ("epochs: 2" in said.out, "told once" in said.err) == (rank == 0, rank == 0)


def test_threads_of_a_rank():
    before = torch.get_num_threads()
    try:
        assert start(digits(threads=2)).size == 1
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
