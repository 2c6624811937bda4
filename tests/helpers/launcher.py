"""Starts real processes of the training command quickly: a server imports the package once and forks for each start.

The forked process has its own memory, signals, limits and exit code, as one started from a shell; only the seconds of
importing torch are saved. `Launcher` is the client, and the file run as a script is the server.
"""

import contextlib
import json
import os
import pkgutil
import resource
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


class Process:
    """A process that was started; its output goes to a file."""

    def __init__(self, launcher: "Launcher", pid: int, log: Path) -> None:
        self.launcher, self.pid, self.log = launcher, pid, log

    def send(self, number: int) -> None:
        os.kill(self.pid, number)

    def wait(self, seconds: float = 900) -> int:
        """Exit code, or minus the signal's number if a signal ended it; the process is killed when time is up."""
        return self.launcher.ask({"wait": self.pid, "seconds": seconds})

    @property
    def output(self) -> str:
        return self.log.read_text()


class Launcher:
    """Starts `hgrn-vision COMMAND ARGUMENTS` in a folder, `train_imagenet.py ARGUMENTS` by default."""

    def __init__(self, folder: Path, command: str = "train") -> None:
        self.folder, self.command, self.count = folder, command, 0
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        self.server = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )

    def ask(self, question: dict) -> int:
        self.server.stdin.write(json.dumps(question) + "\n")
        self.server.stdin.flush()
        return json.loads(self.server.stdout.readline())

    def start(
        self,
        *arguments,
        environment: dict[str, str] | None = None,
        file_limit: int = 0,
        moment: tuple[int, str, str, int] | None = None,
    ) -> Process:
        """One process; `file_limit` is the size in bytes at which its disk is full, `moment` the arguments of `arm`."""
        self.count += 1
        log = self.folder / f"process{self.count}.txt"
        question = {
            "command": self.command,
            "arguments": [str(argument) for argument in arguments],
            "environment": environment or {},
            "folder": str(self.folder),
            "log": str(log),
            "file_limit": file_limit,
            "moment": moment,
        }
        return Process(self, self.ask(question), log)

    def start_ranks(
        self, count: int, *arguments, moments: dict[int, tuple[int, str, str, int]] | None = None
    ) -> list[Process]:
        """Start ranks as torchrun does, without its restarts; `moments` are by rank."""
        shared = {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        ranks = [{**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(count)]
        moments = moments or {}
        return [
            self.start(*arguments, environment=variables, moment=moments.get(rank))
            for rank, variables in enumerate(ranks)
        ]

    def run(self, *arguments, **options) -> tuple[int, str]:
        """Exit code and output of one process."""
        process = self.start(*arguments, **options)
        return process.wait(), process.output

    def close(self) -> None:
        self.server.stdin.close()
        self.server.wait()


def free_port() -> int:
    """A port below the system's ephemeral range, so that no other connection takes it before rank 0 does."""
    first = 10_000 + 97 * os.getpid() % 10_000
    for port in range(first, first + 10_000):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", port))
            return port
    raise OSError("no free port")


def serve() -> None:
    import hgrn_vision.commands.train  # noqa: F401
    from hgrn_vision.cli import main

    for line in sys.stdin:
        question = json.loads(line)
        if "wait" in question:
            answer = wait(question["wait"], question["seconds"])
        else:
            answer = os.fork()
            if answer == 0:
                become(question)
                code = 1
                try:
                    code = main([question["command"], *question["arguments"]])
                except SystemExit as stop:
                    code = stop.code
                finally:
                    sys.stdout.flush()
                    sys.stderr.flush()
                    os._exit(code)
        print(json.dumps(answer), flush=True)


def become(question: dict) -> None:
    log = os.open(question["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.chdir(question["folder"])
    os.environ.update(question["environment"])
    sys.argv = ["train_imagenet.py", *question["arguments"]]
    if question["file_limit"]:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (question["file_limit"], question["file_limit"]))
    if question["moment"]:
        arm(*question["moment"])


def arm(number: int, function: str, about: str, time: int) -> None:
    """This process gets signal `number` when it calls a function for the `time`-th time.

    Args:
        number: of the signal.
        function: its full name, as in 'os.replace'.
        about: only calls whose last argument ends like this count, such as a file's name; '' for all calls.
        time: 1 is the first.
    """
    owner, _, name = function.rpartition(".")
    owner = pkgutil.resolve_name(owner)
    original, count = getattr(owner, name), 0

    def watched(*args, **kwargs):
        nonlocal count
        count += not about or str(args[-1]).endswith(about)
        if count == time:
            count += 1
            os.kill(os.getpid(), number)
        return original(*args, **kwargs)

    setattr(owner, name, watched)


def wait(pid: int, seconds: float) -> int:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.002)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return -signal.SIGKILL


if __name__ == "__main__":
    serve()
