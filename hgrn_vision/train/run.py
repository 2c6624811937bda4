"""The story of a run: data, model, loop, checkpoints, report; the same call continues it wherever it stopped."""

import logging
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from ..data.batches import BadRecord
from ..data.loaders import EvalLoader, TrainLoader, rank_micro_batches
from ..data.spec import DataSpec
from ..data.splits import open_splits, steps_per_epoch
from ..files import write_text
from .answers import KeptAnswers, answers_path
from .build import build_model, build_teacher, data_spec, describe_model, load_body
from .checkpoint import Checkpoint, Checkpoints
from .config import TrainConfig, to_mapping, to_yaml
from .distributed import World, start
from .engine import Engine, Progress
from .environment import versions
from .evaluation import Evaluation, evaluate
from .faults import Diverged, StopRequest
from .memory import keep_freed_memory, peak_memory
from .observer import Observer, Outcome
from .photo_splits import open_photo_splits
from .run_folder import (
    BadImages,
    check_same_run,
    export_model,
    find_best,
    holds_weights,
    restore,
    write_duplicates,
    write_log,
)
from .summary import measure_gates, write_summary
from .trackers import check_trackers, open_trackers

_logger = logging.getLogger(__name__)

STREAK = 3  # bad steps in a row before the run goes back to its last checkpoint
ROLLBACKS = 3  # times it goes back before it gives up
SAVE_BEFORE_EVALUATION = 60.0  # seconds since the last checkpoint after which one is saved before an evaluation


def train(
    config: TrainConfig,
    output: str | Path,
    command: str = "",
    allow_change: bool = False,
    observer: Observer | None = None,
    details: dict[str, str] | None = None,
    weights: Mapping[str, torch.Tensor] | None = None,
) -> Outcome:
    """Start the run in folder `output`, or continue it; called on every process of the run.

    Args:
        config: all settings.
        output: the run folder.
        command: what the user typed, for the report.
        allow_change: continue a run although its recipe has changed.
        observer: receives the events of the run, on rank 0.
        details: recorded with the versions.
        weights: of the same model with any head, for a new run to start from.
    """
    world = start(config)
    if world.device.type == "cpu":
        keep_freed_memory()
    about = {"command": command, **versions(), **(details or {})}
    with StopRequest() as stop:
        run = Run(config, Path(output), world, stop, observer if observer and world.main else Observer(), about)
        run.open(allow_change, weights)
        try:
            with world.watched("the run"):
                outcome = run.go()
        finally:
            run.close()
    world.close()
    return outcome


class Run:
    """A run on one rank; every method is called on all of them."""

    def __init__(
        self,
        config: TrainConfig,
        output: Path,
        world: World,
        stop: StopRequest,
        observer: Observer,
        about: dict[str, str],
    ) -> None:
        self.config, self.output, self.world, self.stop, self.observer = config, output, world, stop, observer
        self.about = about
        self.checkpoints = Checkpoints(output / "checkpoints")

    def open(self, allow_change: bool, weights: Mapping[str, torch.Tensor] | None = None) -> None:
        """Load everything, from a checkpoint if there is one."""
        config, world = self.config, self.world
        # before anything is loaded
        world.on_main(lambda: rank_micro_batches(config, world.rank, world.size))
        world.on_main(lambda: check_trackers(config))
        self.teacher = world.everywhere(lambda: build_teacher(config, world.device))
        self._open_images()
        self.class_names = self.train_split.class_names
        self.steps = steps_per_epoch(self.train_split, config)
        checkpoint = world.on_main(self.checkpoints.load)
        self.resumed = checkpoint is not None
        if checkpoint:
            changes = world.on_main(
                lambda: check_same_run(checkpoint, config, self.train_split, self.output, allow_change)
            )
        pretrained = config.pretrained and not self.resumed
        model = world.everywhere(lambda: build_model(config, len(self.class_names), pretrained))
        if weights and not self.resumed:
            world.everywhere(lambda: load_body(model, weights, config.seed))
        self.spec = data_spec(config, model)
        describe_model(model, self.spec)
        answers = self._open_answers() if config.views else None
        self.engine = world.everywhere(
            lambda: Engine(config, world, model, self.spec, self.steps, self.teacher, answers)
        )
        if checkpoint:
            world.everywhere(lambda: restore(self.engine, checkpoint, changes, self.steps, self.train_split.indexed))
            find_best(self.checkpoints, self.engine, world)
        if self.progress.rollbacks >= ROLLBACKS:
            raise Diverged(self._divergence())
        self._prepare_output()
        self.train_loader = TrainLoader(self.train_split, config, self._pixels_to_read(), world.rank, world.size)
        self.eval_loader = EvalLoader(self.validation, config, self.spec, world.rank, world.size)
        self.agreement_loader = None
        if self.agreement and self.agreement is not self.validation:
            self.agreement_loader = EvalLoader(self.agreement, config, self.spec, world.rank, world.size)

    def _open_images(self) -> None:
        """Open the training and validation images; photographs without labels are labelled by the teacher."""
        config, world = self.config, self.world
        self.agreement, self.photos = None, None
        if not config.photos:
            self.train_split, self.validation = world.everywhere(lambda: open_splits(config))
            return
        splits = world.on_main(lambda: open_photo_splits(config, self.teacher, self.observer.packing))
        self.train_split, self.photos, self.agreement = splits.train, splits.photos, splits.agreement
        self.validation = splits.labelled or splits.agreement

    def _open_answers(self) -> KeptAnswers:
        """The teacher's answers so far to views of the photographs."""
        packed = self.photos.source
        path = answers_path(self.config, packed, self.teacher, self._pixels_to_read())
        views = len(packed) * self.config.views
        return self.world.everywhere(lambda: KeptAnswers(path, views, self.teacher.num_classes))

    def _pixels_to_read(self) -> DataSpec:
        """The student's pixels, at the larger of its own image size and the teacher's."""
        channels, height, width = self.spec.input_size
        if self.teacher:
            _, *own = self.teacher.spec.input_size
            height, width = max(height, own[0]), max(width, own[1])
        return self.spec._replace(input_size=(channels, height, width))

    @property
    def progress(self) -> Progress:
        return self.engine.progress

    @property
    def over(self) -> bool:
        """All epochs are done, or the last ones brought no improvement."""
        progress, patience = self.progress, self.config.patience
        waited = progress.epoch - progress.best["epoch"] if progress.best else 0
        return progress.epoch >= self.config.epochs or bool(patience and waited >= patience)

    def go(self) -> Outcome:
        """Train to the end, or until asked to stop."""
        status: Literal["finished", "finished before"] = "finished before"
        if not self.over:
            status = "finished"
            self.observer.began(self)
            while not self.over:
                if not self._train_epoch():
                    self._save()
                    return Outcome("stopped", self.output, self.progress, self.stop.name)
                self._finish_epoch()
        if self.world.on_main(lambda: status == "finished" or not self._is_complete()):
            self._write_report()
        return Outcome(status, self.output, self.progress)

    def close(self) -> None:
        """End the loaders' processes and the trackers."""
        for loader in (self.train_loader, self.eval_loader, self.agreement_loader):
            if loader:
                loader.close()
        for tracker in self.trackers:
            tracker.close()

    def _prepare_output(self) -> None:
        self.bad_images = self.world.on_main(lambda: BadImages(self.output / "bad_images.csv"))
        if self.photos:
            self.world.on_main(self._write_what_was_left_out)
        if not self.over:
            self.world.on_main(self._write_settings)
        if not self.resumed:
            # a checkpoint to go back to; also fails early if the output cannot be written
            self._save()
        self._saved_at = time.monotonic()
        self.trackers = open_trackers(self.config, self.output, self.progress.updates) if self.world.main else []

    def _write_what_was_left_out(self) -> None:
        """List photographs that could not be packed, and those that look like validation images."""
        found = [BadRecord(self.train_split.name, -1, name, reason) for name, reason in self.photos.bad]
        self._write_bad_images(self.bad_images.add(found))
        if self.photos.duplicates:
            write_duplicates(self.output / "near_duplicates.csv", self.photos.duplicates)

    def _write_settings(self) -> None:
        write_text(self.output / "config.yaml", to_yaml(self.config, self.about))
        write_log(self.output / "log.csv", self.progress.history)

    def _checkpoint(self) -> Checkpoint:
        return replace(
            self.engine.checkpoint(),
            config=to_mapping(self.config),
            class_names=self.class_names,
            train_images=len(self.train_split),
            about=self.about,
        )

    def _save(self, best: bool = False) -> None:
        self.world.on_main(lambda: self.checkpoints.save(self._checkpoint(), best))
        self._saved_at = time.monotonic()

    def _train_epoch(self) -> bool:
        """Run the remaining steps of the epoch; False if the run was asked to stop."""
        batches = self._batches()
        while self.progress.step < self.steps:
            began = time.perf_counter()
            name = f"step {self.progress.updates + 1}"
            with self.world.watched(name):
                step = self.world.everywhere(partial(next, batches), name)
                arrived = time.perf_counter()
                result = self.engine.step(step)
                self.progress.waited += arrived - began
                self.progress.seconds += time.perf_counter() - began
                bad = [record for batch in step for record in batch.bad]
                stop, unreadable, save = self.world.sum([bool(self.stop.name), len(bad), self._save_is_due()])
            self._show_step(result.loss)
            if unreadable:
                self._note_bad_images(bad)
            if self.progress.streak >= STREAK:
                self._roll_back()
                batches = self._batches()
            elif stop:
                return False
            elif save:
                self._save()
        return True

    def _batches(self):
        return self.train_loader.epoch(self.progress.epoch, self.progress.step, self.progress.rollbacks)

    def _save_is_due(self) -> bool:
        """Whether to save after this step: rank 0 decides, and never in the middle of a streak of bad steps."""
        if not self.world.main or self.progress.streak:
            return False
        age = time.monotonic() - self._saved_at
        every, minutes = self.config.save_steps, self.config.save_minutes
        if self.progress.step == self.steps:
            return age > SAVE_BEFORE_EVALUATION
        return bool((every and self.progress.updates % every == 0) or (minutes and age > 60 * minutes))

    def _show_step(self, loss: float) -> None:
        self.observer.stepped(self.progress, loss, self.engine.lr)
        for tracker in self.trackers:
            tracker.log(self.progress.updates, {"step/loss": loss, "step/lr": self.engine.lr})

    def _note_bad_images(self, records: list[BadRecord]) -> None:
        """List unreadable images once for all ranks; too many of them end the run."""
        found = [record for part in self.world.gather(records) for record in part]
        new = self.bad_images.add(found)
        self.world.on_main(lambda: self._write_bad_images(new))

    def _write_bad_images(self, new: bool) -> None:
        if new:
            self.bad_images.write()
        for split in (self.train_split, self.validation):
            count, limit = self.bad_images.count(split.name), self.config.max_bad_fraction
            if count > limit * len(split):
                raise ValueError(
                    f"{count} of {len(split)} {split.name} images are unreadable, more than --max-bad-fraction "
                    f"{limit:g}; {self.bad_images.path} lists them"
                )

    def _roll_back(self) -> None:
        """Return to the last checkpoint and continue with other random numbers."""
        rollbacks, skipped = self.progress.rollbacks + 1, self.progress.skipped
        _logger.warning(
            "%d steps in a row had a non-finite loss or gradient: going back to the last checkpoint", STREAK
        )
        self.engine.restore(self.world.on_main(self.checkpoints.load))
        self.progress.rollbacks, self.progress.skipped, self.progress.streak = rollbacks, skipped, 0
        self._save()
        if rollbacks >= ROLLBACKS:
            raise Diverged(self._divergence())

    def _divergence(self) -> str:
        return (
            f"diverged at step {self.progress.updates}: the loss or its gradient was still not finite after "
            f"going back to the last checkpoint {self.progress.rollbacks} times; lower --lr or raise --warmup-epochs "
            "(with --allow-change), or start again with another --output"
        )

    def _finish_epoch(self) -> None:
        self.observer.evaluating()
        evaluation = self._evaluate(self.eval_loader)
        progress = self.progress
        row = self._row(evaluation)
        if self.agreement:
            row["agreement"] = (self._evaluate(self.agreement_loader) if self.agreement_loader else evaluation).top1
        progress.history.append(row)
        best = progress.best is None or row["val_top1"] > progress.best["val_top1"]
        if best:
            progress.best = row
        progress.next_epoch()
        self._save(best)
        self.world.on_main(lambda: self._write_epoch(best))
        for tracker in self.trackers:
            tracker.log(progress.updates, {f"epoch/{name}": value for name, value in row.items()})
        self.observer.finished_epoch(row, best)

    def _evaluate(self, loader: EvalLoader) -> Evaluation:
        with self.world.watched("evaluation"):
            evaluation = evaluate(self.engine.eval_model, loader, self.engine.transform, self.config, self.world)
        if evaluation.bad:
            # every rank has the whole list already
            self._note_bad_images(evaluation.bad if self.world.main else [])
        return evaluation

    def _row(self, evaluation: Evaluation) -> dict[str, Any]:
        """One row of log.csv."""
        progress = self.progress
        seconds, waited, memory = self.world.sum([progress.seconds, progress.waited, peak_memory(self.world.device)])
        return {
            "epoch": progress.epoch + 1,
            "step": progress.updates,
            "lr": self.engine.lr,
            "train_loss": progress.loss_sum / progress.loss_count if progress.loss_count else float("nan"),
            "val_loss": evaluation.loss,
            "val_top1": evaluation.top1,
            "val_top5": evaluation.top5,
            "images_per_second": progress.step * self.config.batch_size * self.world.size / max(seconds, 1e-9),
            "data_wait": waited / max(seconds, 1e-9),
            "peak_memory": memory / self.world.size,
            "skipped_steps": progress.skipped,
        }

    def _write_epoch(self, best: bool) -> None:
        write_log(self.output / "log.csv", self.progress.history)
        if best:
            export_model(self.output / "model", self.engine.eval_model, self.config, self.class_names)

    def _is_complete(self) -> bool:
        """Whether the files written at the end of a run exist; it may have been killed just before that."""
        best = self.checkpoints.load_best()
        return (self.output / "report.html").exists() and (
            best is None or holds_weights(self.output / "model", best.weights())
        )

    def _write_report(self) -> None:
        """Write the report and the exported model, both of the best epoch."""
        best = self.world.on_main(self.checkpoints.load_best)
        if best:
            self.engine.eval_model.load_state_dict(best.weights())
        evaluation = self._evaluate(self.eval_loader)
        self.world.on_main(lambda: self._write_report_file(evaluation))

    def _write_report_file(self, evaluation: Evaluation) -> None:
        model, transform = self.engine.eval_model, self.engine.transform
        # the export after each best epoch is not enough: the run may have been killed between checkpoint and export
        if not holds_weights(self.output / "model", model.state_dict()):
            export_model(self.output / "model", model, self.config, self.class_names)
        write_summary(
            self.output / "report.html",
            config=self.config,
            about=self.about,
            progress=self.progress,
            validation=self.validation,
            evaluation=evaluation,
            gates=measure_gates(model, self.validation, self.spec, transform),
            bad=sorted(self.bad_images.records.values()),
        )
