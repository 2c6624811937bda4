"""Accuracy of a checkpoint."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..data.loaders import EvalLoader
from ..data.splits import open_validation
from ..data.transforms import BatchTransform
from .build import data_spec, rebuild_model
from .checkpoint import Checkpoints, read
from .config import TrainConfig, from_mapping
from .distributed import start
from .evaluation import Evaluation, evaluate


@dataclass(frozen=True)
class Score:
    """What a checkpoint reached, on which images."""

    path: Path
    config: TrainConfig
    epoch: int
    evaluation: Evaluation
    main: bool  # whether this process is the one to say so


def score(path: str | Path, settings: dict[str, Any]) -> Score:
    """Evaluate a run's best checkpoint, or a checkpoint file, with `settings` laid over the run's own."""
    file = find_checkpoint(Path(path))
    # the machine that evaluates need not be the one that trained
    here = {"device": "auto", "threads": 0, **settings}
    world = start(from_mapping({name: here[name] for name in ("device", "threads")}))
    contents = world.on_main(lambda: read(file))
    config = from_mapping({**contents["config"], **here})
    validation = world.everywhere(lambda: open_validation(config, contents["class_names"]))
    model = rebuild_model(contents).to(world.device)
    spec = data_spec(config, model)
    loader = EvalLoader(validation, config, spec, world.rank, world.size)
    transform = BatchTransform(config, spec, model.num_classes)
    evaluation = evaluate(model, loader, transform, config, world)
    loader.close()
    world.close()
    return Score(file, config, contents["progress"]["epoch"], evaluation, world.main)


def find_checkpoint(path: Path) -> Path:
    """The checkpoint to use of a run folder, or the file itself."""
    if path.is_file():
        return path
    folder = Checkpoints(path / "checkpoints")
    for candidate in (folder.best, folder.last, folder.previous):
        if candidate.exists():
            return candidate
    raise ValueError(f"{path} is neither a checkpoint file nor a run folder with one")
