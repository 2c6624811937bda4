"""Launchers of the fused CPU kernels for the HGRU scan and for the GLU's activation.

The kernels are plain C (cpu_*.c), compiled on first use, once for each dtype, and called through ctypes. They share the
OpenMP runtime that torch has loaded and use torch.get_num_threads() threads; results do not depend on that number.
Functions here take and return plain tensors: dtypes, shapes and devices are the caller's to check.
"""

import ctypes
import functools
import sys
from pathlib import Path

import torch

from .cpu_build import BuildError, find_or_build

# channels that go together: two vectors of AVX-512
BLOCK = 32
# tokens of a chunk, at most; states are saved between chunks, and computed again inside them in backward
CHUNK = 32
# rows of a work unit of the GLU
ROWS = 16
# gradients summed over tokens and batch: five biases, the lower bound, two angles
SUMS = 8

DTYPES = {torch.float32: "HGRN_F32", torch.float64: "HGRN_F64", torch.bfloat16: "HGRN_BF16"}
FOLDER = Path(__file__).resolve().parent
# of each function: pointers, reals, then integers
ARGUMENTS = {
    "cpu_forward.c": {"scan_forward": (9, 0, 7)},
    "cpu_backward.c": {"scan_backward": (12, 0, 7)},
    "cpu_glu.c": {"glu_forward": (3, 0, 3), "glu_backward": (6, 0, 3)},
    "cpu_block.c": {"block_forward": (8, 3, 12)},
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


def unavailable(dtype: torch.dtype = torch.float32) -> str | None:
    """Why the kernels for a dtype cannot be used, or None if they can; builds them on the first call."""
    library = _library(dtype)
    return library if isinstance(library, str) else None


def chunk_length(T: int) -> int:
    """Tokens of a chunk: the number of chunks is a multiple of four where it can be, to be shared evenly by threads."""
    return -(-T // (4 * -(-T // (4 * CHUNK))))


def states_shape(B: int, T: int, D: int, K: int) -> tuple[int, int, int, int]:
    """Shape of the states that enter each chunk of tokens: (B, chunks, [Re, Im] of each direction, channels)."""
    return B, -(-T // chunk_length(T)), 2 * K, _padded(D)


def forward(
    x: torch.Tensor, lower_bound: torch.Tensor, theta: torch.Tensor, bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The scan of x (B, T, 5D or 3D) as the reference defines it: out (B, T, 2D), and the states backward needs."""
    B, T, width = x.shape
    K, D = theta.shape
    rows = width // D
    out = torch.empty(B, T, 2 * _padded(D), dtype=x.dtype)
    real = lower_bound.dtype
    states = torch.empty(states_shape(B, T, D, K), dtype=real)
    decays = torch.empty(B, states.shape[1], _padded(D), dtype=real)
    tokens = torch.empty(_padded(D) // BLOCK if B == 1 else _threads(x), T, 3 * BLOCK, dtype=real)
    inputs = _pad(x, D), *_constants(lower_bound, theta, bias, rows)
    room = channels_room(lower_bound), tokens, decays
    call("scan_forward", x, *inputs, *room, states, out, B, T, _padded(D), rows, K, chunk_length(T), _threads(x))
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
    real, chunks = lower_bound.dtype, states.shape[1]
    decays = torch.empty(B, chunks, _padded(D), dtype=real)
    adjoints = torch.empty(states.shape, dtype=real)
    partial = torch.empty(B, chunks, SUMS, _padded(D), dtype=real)
    sums = torch.empty(SUMS, _padded(D), dtype=real)
    inputs = _pad(dout, D), _pad(x, D), *_constants(lower_bound, theta, bias, rows), states.contiguous()
    room = channels_room(lower_bound), decays, adjoints, partial
    call("scan_backward", x, *inputs, *room, dx, sums, B, T, _padded(D), rows, K, chunk_length(T), _threads(x))
    # each its own memory: the results of an operator may not share any
    dbias = sums[:rows, :D].flatten().clone() if bias is not None else torch.empty(0, dtype=sums.dtype)
    return _crop(dx, D), dbias, sums[5, :D].clone(), sums[6 : 6 + K, :D].clone()


def glu_forward(x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """SiLU(a) * v with [a | v] = x + bias, x (..., 2H)."""
    H = x.shape[-1] // 2
    out = torch.empty(*x.shape[:-1], H, dtype=x.dtype)
    call("glu_forward", x, x.contiguous(), _bias(bias, x), out, x.numel() // (2 * H), H, _threads(x))
    return out


def glu_backward(dout: torch.Tensor, x: torch.Tensor, bias: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients (dx, dbias) for dout (..., H); dbias is empty without a bias."""
    H = x.shape[-1] // 2
    N = x.numel() // (2 * H)
    dx = torch.empty(x.shape, dtype=x.dtype)
    biases = _bias(bias, x)
    dbias = torch.empty(2 * H, dtype=biases.dtype)
    partial = torch.empty(-(-N // ROWS), 2 * H, dtype=biases.dtype)
    call("glu_backward", x, dout.contiguous(), x.contiguous(), biases, partial, dx, dbias, N, H, _threads(x))
    return dx, dbias.to(bias.dtype) if bias is not None else torch.empty(0, dtype=dbias.dtype)


def call(name: str, like: torch.Tensor, *args: torch.Tensor | float) -> None:
    """Call a C function, compiled for the dtype of `like`."""
    library = _library(like.dtype)
    if isinstance(library, str):
        raise RuntimeError(f"the CPU kernels cannot be used: {library}")
    getattr(library, name)(*[_argument(a) for a in args])


def _argument(value):
    """As C wants it: the address of what a tensor, an array or a structure holds, a number as it is."""
    if isinstance(value, torch.Tensor):
        return value.data_ptr()
    return ctypes.addressof(value) if isinstance(value, ctypes.Array | ctypes.Structure) else value


def _threads(x: torch.Tensor) -> int:
    # below this a second thread costs more than it saves; torch itself draws the line at the same size
    return torch.get_num_threads() if x.numel() >= 32768 else 1


def channels_room(like: torch.Tensor) -> torch.Tensor:
    """Room for what the kernels keep about each channel: five biases, the lower bound, two rotations of four parts."""
    return torch.empty(14, _padded(like.shape[0]), dtype=like.dtype)


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


def _bias(bias: torch.Tensor | None, x: torch.Tensor) -> torch.Tensor:
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    return torch.zeros(x.shape[-1], dtype=dtype) if bias is None else bias.to(dtype).contiguous()


@functools.cache
def _library(dtype: torch.dtype) -> ctypes.CDLL | str:
    """The kernels for a dtype, or the reason why there are none."""
    if sys.platform == "win32":
        return "they are not built on Windows"
    # torch's library has no such product of bf16
    sources = [name for name in ARGUMENTS if dtype != torch.bfloat16 or name != "cpu_block.c"]
    try:
        flags = [*FLAGS, f"-D{DTYPES[dtype]}"]
        library = find_or_build([FOLDER / name for name in sources], sorted(FOLDER.glob("*.h")), flags)
    except (BuildError, OSError) as error:
        return str(error)
    for name, (pointers, reals, integers) in [item for source in sources for item in ARGUMENTS[source].items()]:
        function = getattr(library, name)
        function.argtypes = [ctypes.c_void_p] * pointers + [ctypes.c_double] * reals + [ctypes.c_int64] * integers
        function.restype = None
    return library
