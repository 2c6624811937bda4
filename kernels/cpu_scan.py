"""Launchers of the fused CPU kernels: the HGRU scan and the GLU's activation.

The kernels are plain C (cpu_scan.c, cpu_glu.c), compiled on first use by the system's compiler into the user's cache
folder, once for each dtype, and called through ctypes. They share the OpenMP runtime that torch has loaded and use
torch.get_num_threads() threads; results do not depend on that number. Functions here take and return plain tensors:
dtypes, shapes and devices are the caller's to check.
"""

import ctypes
import functools
import hashlib
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

# channels of a work unit: two vectors of AVX-512, and six units for two threads in an image of width 192
BLOCK = 32
# tokens between two saved states; those of a chunk are computed again in backward
CHUNK = 32
# rows of a work unit of the GLU
ROWS = 16
# gradients summed over tokens and batch: five biases, the lower bound, two angles
SUMS = 8

DTYPES = {torch.float32: "HGRN_F32", torch.float64: "HGRN_F64", torch.bfloat16: "HGRN_BF16"}
SOURCES = ("cpu_scan.c", "cpu_glu.c")
HEADERS = ("cpu_math.h",)
# of each function: pointers, reals, then integers, of which the last is the number of threads
ARGUMENTS = {
    "scan_forward": (9, 1, 6),
    "scan_backward": (11, 0, 6),
    "glu_forward": (3, 0, 3),
    "glu_backward": (6, 0, 3),
}
FLAGS = (
    "-O3",
    "-std=c11",
    "-fPIC",
    # not -ffast-math: merely loading such a library can make the whole process flush denormals, and NaN tests vanish
    "-fno-math-errno",
    "-fno-trapping-math",
    "-ffp-contract=fast",
    f"-DBLOCK={BLOCK}",
    f"-DCHUNK={CHUNK}",
    f"-DROWS={ROWS}",
)


class BuildError(RuntimeError):
    """The kernels cannot be built here; the message is one line that says why."""


def unavailable(dtype: torch.dtype = torch.float32) -> str | None:
    """Why the kernels for a dtype cannot be used, or None if they can; builds them on the first call."""
    library = _library(dtype)
    return library if isinstance(library, str) else None


def states_shape(B: int, T: int, D: int, K: int) -> tuple[int, int, int, int]:
    """Shape of the states that enter each chunk of tokens: (B, chunks, [Re, Im] of each direction, channels)."""
    return B, -(-T // CHUNK), 2 * K, _padded(D)


def forward(
    x: torch.Tensor,
    lower_bound: torch.Tensor,
    theta: torch.Tensor,
    bias: torch.Tensor | None,
    norm: tuple[torch.Tensor, torch.Tensor, float] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The scan of x (B, T, 5D or 3D) as the reference defines it: out (B, T, 2D), and the states backward needs.

    With the weight, bias and epsilon of a LayerNorm, out is normalized on the way.
    """
    B, T, width = x.shape
    K, D = theta.shape
    rows = width // D
    if norm and D % BLOCK:
        # the zeros that fill up a block must not count
        out, states = forward(x, lower_bound, theta, bias)
        return torch.nn.functional.layer_norm(out, (2 * D,), *norm), states
    weight, shift, eps = norm or (None, None, 0.0)
    real = lower_bound.dtype
    out = torch.empty(B, T, 2 * _padded(D), dtype=x.dtype)
    states = torch.empty(states_shape(B, T, D, K), dtype=real)
    turns = torch.empty(K, 4, _padded(D), dtype=real)
    inputs = _pad(x, D), *_constants(lower_bound, theta, bias, rows), _plain(weight, real), _plain(shift, real)
    _call("scan_forward", x, *inputs, turns, states, out, eps, B, T, _padded(D), rows, K)
    return _crop(out, D), states


def backward(
    dout: torch.Tensor,
    x: torch.Tensor,
    lower_bound: torch.Tensor,
    theta: torch.Tensor,
    bias: torch.Tensor | None,
    states: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients (dx, dbias, dlower_bound, dtheta) for dout (B, T, 2D); dbias is empty without a bias."""
    B, T, width = x.shape
    K, D = theta.shape
    rows = width // D
    dx = torch.empty(B, T, rows * _padded(D), dtype=x.dtype)
    turns = torch.empty(K, 4, _padded(D), dtype=lower_bound.dtype)
    adjoints = torch.empty(B, states.shape[1], 2, _padded(D), dtype=lower_bound.dtype)
    partial = torch.empty(B, SUMS, _padded(D), dtype=torch.float64)
    sums = torch.empty(SUMS, _padded(D), dtype=lower_bound.dtype)
    inputs = _pad(dout, D), _pad(x, D), *_constants(lower_bound, theta, bias, rows), states.contiguous()
    _call("scan_backward", x, *inputs, turns, adjoints, partial, dx, sums, B, T, _padded(D), rows, K)
    # each its own memory: the results of an operator may not share any
    dbias = sums[:rows, :D].flatten().clone() if bias is not None else torch.empty(0, dtype=sums.dtype)
    return _crop(dx, D), dbias, sums[5, :D].clone(), sums[6 : 6 + K, :D].clone()


def glu_forward(x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """SiLU(a) * v with [a | v] = x + bias, x (..., 2H)."""
    H = x.shape[-1] // 2
    out = torch.empty(*x.shape[:-1], H, dtype=x.dtype)
    _call("glu_forward", x, x.contiguous(), _bias(bias, x), out, x.numel() // (2 * H), H)
    return out


def glu_backward(dout: torch.Tensor, x: torch.Tensor, bias: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients (dx, dbias) for dout (..., H); dbias is empty without a bias."""
    H = x.shape[-1] // 2
    N = x.numel() // (2 * H)
    dx = torch.empty(x.shape, dtype=x.dtype)
    biases = _bias(bias, x)
    dbias = torch.empty(2 * H, dtype=biases.dtype)
    partial = torch.empty(-(-N // ROWS), 2 * H, dtype=biases.dtype)
    _call("glu_backward", x, dout.contiguous(), x.contiguous(), biases, partial, dx, dbias, N, H)
    return dx, dbias.to(bias.dtype) if bias is not None else torch.empty(0, dtype=dbias.dtype)


def _call(name: str, like: torch.Tensor, *args: torch.Tensor | int) -> None:
    """Call a C function, compiled for the dtype of `like`, whose last argument is the number of threads."""
    library = _library(like.dtype)
    if isinstance(library, str):
        raise RuntimeError(f"the CPU kernels cannot be used: {library}")
    # below this a second thread costs more than it saves; torch itself draws the line at the same size
    threads = torch.get_num_threads() if like.numel() >= 32768 else 1
    getattr(library, name)(*[a.data_ptr() if isinstance(a, torch.Tensor) else a for a in args], threads)


def _padded(D: int) -> int:
    return -(-D // BLOCK) * BLOCK


def _pad(t: torch.Tensor, D: int) -> torch.Tensor:
    """Contiguous, each row of D channels filled up with zeros to whole blocks."""
    if D % BLOCK == 0:
        return t.contiguous()
    return torch.nn.functional.pad(t.unflatten(-1, (-1, D)), (0, _padded(D) - D)).flatten(-2)


def _crop(t: torch.Tensor, D: int) -> torch.Tensor:
    return t if D % BLOCK == 0 else t.unflatten(-1, (-1, _padded(D)))[..., :D].flatten(-2)


def _constants(
    lower_bound: torch.Tensor, theta: torch.Tensor, bias: torch.Tensor | None, rows: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    D = lower_bound.shape[0]
    bias = lower_bound.new_zeros(rows * D) if bias is None else bias
    return _pad(lower_bound, D), _pad(theta, D), _pad(bias, D)


def _plain(t: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    return None if t is None else t.to(dtype).contiguous()


def _bias(bias: torch.Tensor | None, x: torch.Tensor) -> torch.Tensor:
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    return torch.zeros(x.shape[-1], dtype=dtype) if bias is None else bias.to(dtype).contiguous()


@functools.cache
def _library(dtype: torch.dtype) -> ctypes.CDLL | str:
    """The kernels for a dtype, or the reason why there are none."""
    if sys.platform == "win32":
        return "they are not built on Windows"
    try:
        return _find_or_build(DTYPES[dtype])
    except (BuildError, OSError) as error:
        return str(error)


def _find_or_build(define: str) -> ctypes.CDLL:
    compiler, version = _compiler()
    runtime = _openmp_runtime()
    here = Path(__file__).resolve().parent
    code = [(here / name).read_bytes() for name in SOURCES + HEADERS]
    identity = "\n".join([*FLAGS, define, *compiler, version, str(runtime), _cpu()])
    key = hashlib.sha256(b"\0".join([identity.encode(), *code])).hexdigest()[:16]
    folder = _cache_folder()
    for path in sorted(folder.glob(f"{key}-*.so")) if folder else ():
        # a truncated library can kill the process that loads it: look before
        if path.stem == f"{key}-{_checksum(path)}":
            return _load(path)
        path.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory(prefix="hgrn_vision-") as work:
        library = _build(Path(work), here, define, compiler, runtime)
        # once loaded it stays in memory, also when its file is gone
        return _load(_keep(library, folder, key))


def _load(path: Path) -> ctypes.CDLL:
    library = ctypes.CDLL(str(path))
    for name, (pointers, reals, integers) in ARGUMENTS.items():
        function = getattr(library, name)
        function.argtypes = [ctypes.c_void_p] * pointers + [ctypes.c_double] * reals + [ctypes.c_int64] * integers
        function.restype = None
    return library


def _build(work: Path, here: Path, define: str, compiler: list[str], runtime: str | None) -> Path:
    """Compile and link in a folder of our own: with OpenMP and for this CPU, or with less where that fails."""
    objects = [str(work / f"{name}.o") for name in SOURCES]
    library = work / "kernels.so"
    attempts = [(["-march=native"], None), ([], None)]
    if runtime:
        attempts.insert(0, (["-march=native", "-fopenmp"], runtime))
    reason = ""
    for extra, linked in attempts:
        flags = [*FLAGS, *extra, f"-D{define}"]
        compiles = [[*compiler, *flags, "-c", str(here / c), "-o", o] for c, o in zip(SOURCES, objects, strict=True)]
        # named by its path, so that it is torch's runtime and no second one that is linked; not finding all of
        # OpenMP there is an error here and not when the library is loaded
        openmp = [linked, "-Wl,--no-undefined", "-lc"] if linked else []
        try:
            for command in [*compiles, [*compiler, "-shared", "-o", str(library), *objects, "-lm", *openmp]]:
                _run(command)
            return library
        except BuildError as error:
            reason = reason or str(error)
    raise BuildError(reason)


def _run(command: list[str]) -> str:
    """Run a compiler and return what it printed; what goes wrong becomes a BuildError with its first error line."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=300)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"C compiler {command[0]}: {error}") from error
    if done.returncode != 0:
        lines = [line.strip() for line in (done.stderr + done.stdout).splitlines() if line.strip()]
        first = next((line for line in lines if "error" in line.lower()), lines[0] if lines else "no message")
        raise BuildError(f"C compiler {command[0]} failed with status {done.returncode}: {first}")
    return done.stdout


def _compiler() -> tuple[list[str], str]:
    """The C compiler's command, from CC or the usual names, and what it says about its version."""
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


def _cache_folder() -> Path | None:
    """A folder that only this user can write to, or None where there is none to be had."""
    asked = os.environ.get("XDG_CACHE_HOME", "")
    try:
        folder = (Path(asked) if os.path.isabs(asked) else Path.home() / ".cache") / "hgrn_vision"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        # what lies in someone else's folder is not ours to run
        if folder.stat().st_uid != os.getuid():
            return None
        folder.chmod(0o700)
    except (OSError, RuntimeError):
        return None
    return folder


def _checksum(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def _keep(library: Path, folder: Path | None, key: str) -> Path:
    """Move the library into the cache folder in one step, or leave it where it is if that cannot be."""
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
