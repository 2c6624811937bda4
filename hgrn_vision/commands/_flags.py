"""Arguments shared by several commands; the flags for settings are generated from the fields of TrainConfig."""

import argparse
import glob
import os
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import MISSING, fields
from typing import Any, Literal

from ..data.images import MAX_PIXELS
from ..data.sources import EXTENSIONS, MORE_EXTENSIONS
from ..train.config import TrainConfig, describe, field_types, read_value

MODEL_HELP = "run, model folder, weights file, hf-hub:NAME, or hgrn_deit_tiny for the packaged weights"


def at_least_one(text: str) -> int:
    """Parse a positive integer, for argparse."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive integer")
    return int(text)


def add_inference_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags shared by commands that process many images."""
    parser.add_argument(
        "--img-size", type=at_least_one, metavar="N", help="side of the model's input (default: as trained)"
    )
    parser.add_argument(
        "--batch-size", type=at_least_one, default=32, metavar="N", help="images per forward pass (default 32)"
    )
    parser.add_argument("--max-pixels", type=at_least_one, default=MAX_PIXELS, metavar="N", help="refuse larger images")
    parser.add_argument("--device", default="auto", help="cpu, cuda, ... (default: a GPU if there is one)")


# settings for photographs without labels, which only `distill` uses
OF_PHOTOGRAPHS = ("photos", "val", "pack", "cache", "views")


def add_setting_flags(
    parser: argparse.ArgumentParser, leave_out: Collection[str] = (), shown: Mapping[str, str] | None = None
) -> None:
    """Add one flag per setting; flags that are not given are absent from the parsed arguments.

    Args:
        parser: the parser to add them to.
        leave_out: settings that get no flag.
        shown: if given, the only settings that --help lists, with their help texts.
    """
    groups: dict[str, Any] = {"recipe": parser, "machine": parser}
    if shown is None:
        groups = {
            "recipe": parser.add_argument_group(
                "recipe", "what is learned; fixed once a run has started [the paper's value]"
            ),
            "machine": parser.add_argument_group("machine", "where and how fast; may change when a run continues"),
        }
    types = field_types()
    for item in fields(TrainConfig):
        if item.name in leave_out:
            continue
        default = item.default_factory() if item.default is MISSING else item.default
        text = f"{item.metadata['help']} [{_spell(default)}]".replace("%", "%%")
        groups[item.metadata["kind"]].add_argument(
            f"--{item.name.replace('_', '-')}",
            dest=item.name,
            default=argparse.SUPPRESS,
            help=text if shown is None else shown.get(item.name, argparse.SUPPRESS),
            **_options(types[item.name]),
        )


def given_settings(args: argparse.Namespace) -> dict[str, Any]:
    """The settings that were given as flags."""
    names = {item.name for item in fields(TrainConfig)}
    return {name: value for name, value in vars(args).items() if name in names}


def _options(annotation: Any) -> dict[str, Any]:
    base, arguments, optional = describe(annotation)
    if base is bool:
        return {"action": argparse.BooleanOptionalAction}
    if base is Literal:
        return {"choices": arguments}
    if base is dict:
        return {"action": _KeyValues, "nargs": "+", "metavar": "KEY=VALUE"}
    if base is tuple:
        if arguments[-1] is Ellipsis:
            return {"type": arguments[0], "nargs": "+", "metavar": "TEXT"}
        return {"type": arguments[0], "nargs": len(arguments), "metavar": "X"}
    metavar = {int: "N", float: "X", str: "TEXT"}[base]
    return {"type": _or_none(base) if optional else base, "metavar": metavar}


def _or_none(base: type) -> Any:
    def parse(text: str) -> Any:
        return None if text == "none" else base(text)

    # argparse prints the type's name in its error message
    parse.__name__ = base.__name__
    return parse


class _KeyValues(argparse.Action):
    def __call__(self, parser, namespace, values, option_string=None):
        pairs = [value.partition("=") for value in values]
        for key, equals, _ in pairs:
            if not key or not equals:
                parser.error(f"{option_string} takes KEY=VALUE, got {key!r}")
        setattr(namespace, self.dest, {key: read_value(value) for key, _, value in pairs})


def _spell(default: Any) -> str:
    if isinstance(default, tuple) and default:
        return " ".join(f"{value:g}" for value in default)
    if isinstance(default, bool):
        return "on" if default else "off"
    if isinstance(default, float):
        return f"{default:g}"
    return str(default) if default not in (None, "", {}, ()) else "none"


def find_images(inputs: Iterable[str]) -> Iterator[str]:
    """The image paths of all inputs; missing files are passed on, so that they get their own row in the output."""
    for text in inputs:
        if text == "-":
            lines = (os.fsdecode(line.rstrip(b"\r\n")) for line in sys.stdin.buffer)
            yield from find_images(line for line in lines if line and line != "-")
        elif os.path.isdir(text):
            yield from _below(text)
        elif glob.has_magic(text) and not os.path.lexists(text):
            matches = sorted(glob.iglob(text, recursive=True))
            yield from find_images(matches) if matches else [text]
        else:
            yield text


def _below(folder: str) -> Iterator[str]:
    found = False
    for root, folders, files in os.walk(folder, followlinks=True):
        folders.sort()
        for name in sorted(files):
            if name.lower().endswith(EXTENSIONS + MORE_EXTENSIONS) and not name.startswith("."):
                found = True
                yield os.path.join(root, name)
    if not found:
        yield folder
