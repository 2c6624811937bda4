"""Compiling C files on first use, with the system's compiler, into the user's cache folder.

A library is identified by its sources, its flags, the compiler and the CPU. It is written atomically, so that many
processes can start at once, into a folder that only the user can write to, and is rebuilt if its file is damaged.
"""

import ctypes
import hashlib
import os
import platform
import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch


class BuildError(RuntimeError):
    """A library cannot be built here; the message is one line that says why."""


def find_or_build(sources: Sequence[Path], headers: Sequence[Path], flags: Sequence[str]) -> ctypes.CDLL:
    """The library of these C files; raises BuildError or OSError if it does not exist and cannot be built."""
    command, version = compiler()
    runtime = _openmp_runtime()
    identity = "\n".join([*flags, *command, version, str(runtime), _cpu()])
    code = [path.read_bytes() for path in (*sources, *headers)]
    key = hashlib.sha256(b"\0".join([identity.encode(), *code])).hexdigest()[:16]
    folder = cache_folder()
    for path in sorted(folder.glob(f"{key}-*.so")) if folder else ():
        # a truncated library can kill the process that loads it: check first
        if path.stem == f"{key}-{_checksum(path)}":
            return ctypes.CDLL(str(path))
        path.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory(prefix="hgrn_vision-") as work:
        library = _build(Path(work), sources, flags, command, runtime)
        # once loaded it stays in memory, even after its file is gone
        return ctypes.CDLL(str(_keep(library, folder, key)))


def _build(work: Path, sources: Sequence[Path], flags: Sequence[str], compiler: list[str], runtime: str | None) -> Path:
    """Compile and link in the folder `work`: with OpenMP and for this CPU if possible, else without."""
    objects = [str(work / f"{path.stem}.o") for path in sources]
    library = work / "kernels.so"
    attempts = [(["-march=native"], None), ([], None)]
    if runtime:
        attempts.insert(0, (["-march=native", "-fopenmp"], runtime))
    reason = ""
    for extra, linked in attempts:
        start = [*compiler, *flags, *extra, "-c"]
        compiles = [[*start, str(path), "-o", target] for path, target in zip(sources, objects, strict=True)]
        # by its path, so that torch's own runtime is linked and not a second one; if it lacks a part of OpenMP, linking
        # fails, rather than loading later
        openmp = [linked, "-Wl,--no-undefined", "-lc"] if linked else []
        try:
            for command in [*compiles, [*compiler, "-shared", "-o", str(library), *objects, "-lm", *openmp]]:
                _run(command)
            return library
        except BuildError as error:
            reason = reason or str(error)
    raise BuildError(reason)


def _run(command: list[str]) -> str:
    """Run a compiler and return its output; a failure is a BuildError with the first error line."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=300)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"C compiler {command[0]}: {error}") from error
    if done.returncode != 0:
        lines = [line.strip() for line in (done.stderr + done.stdout).splitlines() if line.strip()]
        first = next((line for line in lines if "error" in line.lower()), lines[0] if lines else "no message")
        raise BuildError(f"C compiler {command[0]} failed with status {done.returncode}: {first}")
    return done.stdout


def compiler() -> tuple[list[str], str]:
    """The C compiler's command, from CC or the usual names, and the version that it reports."""
    asked = shlex.split(os.environ.get("CC", ""))
    if asked:
        return asked, _run([*asked, "--version"])
    for name in ("cc", "gcc", "clang"):
        if shutil.which(name):
            return [name], _run([name, "--version"])
    raise BuildError("no C compiler found (cc, gcc or clang; another one can be named in CC)")


def _openmp_runtime() -> str | None:
    """Path of the OpenMP library that torch has loaded; a second one in the process would start threads of its own."""
    try:
        mapped = [line.split(maxsplit=5)[-1] for line in Path("/proc/self/maps").read_text().splitlines()]
    except OSError:
        return None
    found = {path for path in mapped if re.fullmatch(r"lib(gomp|iomp5|omp)\b.*\.so[.0-9]*", os.path.basename(path))}
    ours = str(Path(torch.__file__).parent)
    return min(found, key=lambda path: (not path.startswith(ours), path), default=None)


def _cpu() -> str:
    """What -march=native depends on: a home folder may be shared by different machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    names = ("model name", "flags", "Features", "CPU part")
    return "\n".join(sorted({line for line in lines if line.startswith(names)})) + platform.machine()


def cache_folder() -> Path | None:
    """A folder that only this user can write to, or None if there is none."""
    asked = os.environ.get("XDG_CACHE_HOME", "")
    try:
        folder = (Path(asked) if os.path.isabs(asked) else Path.home() / ".cache") / "hgrn_vision"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        # never run what another user may have put there
        if folder.stat().st_uid != os.getuid():
            return None
        folder.chmod(0o700)
    except (OSError, RuntimeError):
        return None
    return folder


def _checksum(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def _keep(library: Path, folder: Path | None, key: str) -> Path:
    """Move the library into the cache folder atomically, or leave it where it is if that fails."""
    if folder is None:
        return library
    try:
        kept = folder / f"{key}-{_checksum(library)}.so"
        handle, part = tempfile.mkstemp(dir=folder, suffix=".part")
        os.close(handle)
        shutil.copyfile(library, part)
        os.replace(part, kept)
    except OSError:
        return library
    return kept
