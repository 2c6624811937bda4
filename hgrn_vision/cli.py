"""The `hgrn-vision` command: finds the command's module in commands/, parses its flags, turns errors into one line."""

import argparse
import importlib
import os
import signal
import sys
from collections.abc import Sequence
from typing import NoReturn

# a command is a module of commands/ with EXAMPLE, add_arguments(parser) and run(args) -> exit code;
# only the module of the requested command is imported, so that --help is quick
COMMANDS = {
    "train": "train a model, or continue a run",
    "finetune": "train a classifier on a folder of your own images",
    "distill": "train a small model on photographs without labels, taught by a good one",
    "compare": "compare models or settings over several seeds, with error bars and a report",
    "predict": "classify images: class names and probabilities",
    "evaluate": "measure a model's accuracy on labelled images, class by class",
    "bench": "measure speed and memory next to other timm models",
    "explain": "draw a model's forget gates, token mixing and evidence for images",
    "export": "write a file that runs without this package (ONNX, pt2, TorchScript), or a web page",
    "publish": "write a trained model as a Hub repository, to share it",
    "models": "list the models of this package with their size and cost",
    "digits": "write the packaged digits as PNG files, to try the other commands on",
    "pathfinder": "draw the Pathfinder task: are two dots joined by a dashed curve?",
    "doctor": "check this machine: versions, devices, backends, disk and memory",
}


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line, without the usage text."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")


def build_parser(command: str | None) -> Parser:
    """The parser; flags are added for `command` only."""
    parser = Parser(prog="hgrn-vision", description="Recurrent vision backbones for timm.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, summary in COMMANDS.items():
        if name == command:
            module = importlib.import_module(f"hgrn_vision.commands.{name}")
            sub = commands.add_parser(
                name,
                help=summary,
                description=summary,
                epilog=f"example:  {module.EXAMPLE}",
                formatter_class=argparse.RawDescriptionHelpFormatter,
                allow_abbrev=False,
            )
            module.add_arguments(sub)
            sub.set_defaults(run=module.run)
        else:
            commands.add_parser(name, help=summary)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; bad input gives one line on standard error and exit code 2."""
    argv = list(sys.argv[1:] if argv is None else argv)
    command = argv[0] if argv and argv[0] in COMMANDS else None
    args = build_parser(command).parse_args(argv)
    try:
        code = args.run(args)
        # flush here rather than at exit, so that a closed pipe raises inside this try
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        # discard what is still buffered: flushing it at exit would raise again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except (ValueError, OSError, ImportError) as error:
        if os.environ.get("HGRN_VISION_TRACEBACK"):
            raise
        message = " ".join(str(error).split())
        print(f"hgrn-vision {args.command}: {message}", file=sys.stderr)
        return 2
    except (MemoryError, RuntimeError) as error:
        from .train.faults import is_out_of_memory  # here, since it imports torch

        if not is_out_of_memory(error) or os.environ.get("HGRN_VISION_TRACEBACK"):
            raise
        print(f"hgrn-vision {args.command}: out of memory; try smaller images or batches", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"hgrn-vision {args.command}: interrupted", file=sys.stderr)
        return 130
