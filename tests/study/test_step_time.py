"""How long steps take, and the schedule that fits into minutes."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
from training import digits

from hgrn_vision.study import step_time
from hgrn_vision.study.step_time import fit_minutes, time_steps
from hgrn_vision.train.run import train


@pytest.mark.parametrize(
    "seconds, epochs, epoch_steps",
    [
        (0.6, 10, 10),  # 100 steps: the 10 epochs of before, 10 steps each
        (0.1, 15, 40),  # 600 steps, at most 44 in an epoch
        (20.0, 3, 1),  # 3 steps
        (90.0, 1, 1),  # at least one
    ],
)
def test_the_schedule_fits_the_minutes(seconds, epochs, epoch_steps):
    fitted = fit_minutes(digits(epochs=10, epoch_steps=None, warmup_epochs=2.0), 1.0, seconds, 44)
    assert (fitted.epochs, fitted.epoch_steps) == (epochs, epoch_steps)
    # the same share of the schedule
    assert fitted.warmup_epochs / fitted.epochs == pytest.approx(0.2)


@pytest.mark.parametrize(
    "seconds, epochs, epoch_steps",
    [
        (0.50, 300, 2),  # 600 steps
        (0.51, 294, 2),  # 588 steps
        (0.26, 288, 4),  # 1,153 steps, a prime number
    ],
)
def test_a_slightly_slower_step_costs_few_steps(seconds, epochs, epoch_steps):
    fitted = fit_minutes(digits(epochs=300, epoch_steps=None), 5.0, seconds, 600)
    assert (fitted.epochs, fitted.epoch_steps) == (epochs, epoch_steps)


@pytest.mark.parametrize("epochs", [1, 2, 3, 10, 18, 300])
@pytest.mark.parametrize("steps", [1, 2, 7, 44, 600])
def test_the_minutes_are_used_up_at_any_pace(epochs, steps):
    config = digits(epochs=epochs, epoch_steps=None, warmup_epochs=0.1 * epochs)
    for fit in [*range(1, 150), *range(150, 40_000, 997)]:
        fitted = fit_minutes(config, 1.0, 60 / (fit + 0.5), steps)
        planned = fitted.epochs * fitted.epoch_steps
        assert 1 <= fitted.epoch_steps <= steps and fit - fitted.epoch_steps < planned <= fit
        assert planned >= 0.9 * fit or fit < 20
        # about as many epochs as before, if the images provide the steps
        assert fitted.epochs <= 2 * max(epochs, -(-fit // steps)) and fitted.epochs >= min(0.6 * epochs, fit)
        assert fitted.warmup_epochs / fitted.epochs == pytest.approx(0.1)


def test_more_minutes_than_anyone_has_are_planned_at_once():
    fitted = fit_minutes(digits(epochs=300, epoch_steps=None), 1e6, 1e-3, 600)
    assert 60e9 - 600 < fitted.epochs * fitted.epoch_steps <= 60e9


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


def test_neither_the_first_steps_nor_evaluation_count(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(step_time.time, "perf_counter", lambda: clock[0])
    watch = step_time._Stopwatch(seconds=5.0)
    watch.began(None)
    for seconds in (90.0, 30.0, 2.0):
        clock[0] += seconds
        watch.stepped(None, 0.0, 0.0)
    # an epoch ends
    clock[0] += 60.0
    watch.finished_epoch({}, best=True)
    clock[0] += 2.5
    watch.stepped(None, 0.0, 0.0)
    clock[0] += 0.5
    with pytest.raises(step_time._Enough):
        watch.stepped(None, 0.0, 0.0)
    assert watch.times == [90.0, 30.0, 2.0, 2.5, 0.5]


def test_timing_is_a_short_run_without_trackers(monkeypatch):
    asked = []

    def steps(config, folder, observer):
        asked.append(config)
        observer.times += [9.0, 9.0, 1.0, 3.0, 2.0] if config.seed else [4.0, 6.0]
        return SimpleNamespace(status="finished")

    monkeypatch.setattr(step_time, "train", steps)
    config = digits(tensorboard=True, wandb="mine", save_steps=3, save_minutes=1.0, eval_images=0, seed=1)
    found = time_steps({"long": config, "of two steps": replace(config, seed=0)})
    assert found == {"long": 2.0, "of two steps": 5.0}
    quick = replace(config, tensorboard=False, wandb="", save_steps=0, save_minutes=0.0, eval_images=config.micro_batch)
    assert asked == [quick, replace(quick, seed=0)] * step_time.TURNS
    monkeypatch.setattr(step_time, "train", lambda *args, **options: SimpleNamespace(status="stopped"))
    assert time_steps({"long": config}) is None
