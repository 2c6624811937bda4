"""The fused CPU kernels as a library: plain C (cpu_*.c), compiled on first use, once per dtype, called through ctypes.

The kernels share the OpenMP runtime that torch has loaded; results do not depend on the number of threads.
"""

import ctypes
import functools
import sys
from pathlib import Path

import torch

from .cpu_build import BuildError, find_or_build

# channels that are processed together: two vectors of AVX-512
BD = 32
# tokens per chunk, at most; states between chunks are saved, those inside them are recomputed in backward
CHUNK = 32
# columns of a grid that are scanned together
BAND = 8
# rows per work unit of the GLU and of the convolution
ROWS = 16

DTYPES = {torch.float32: "HGRN_F32", torch.float64: "HGRN_F64", torch.bfloat16: "HGRN_BF16"}
FOLDER = Path(__file__).resolve().parent
# how many pointers, reals and integers each function takes, in this order
ARGUMENTS = {
    "cpu_scan_forward.c": {"scan_forward": (9, 0, 7)},
    "cpu_scan_backward.c": {"scan_backward": (12, 0, 7)},
    "cpu_grid_forward.c": {"grid_forward": (8, 0, 7)},
    "cpu_grid_backward.c": {"grid_backward": (11, 0, 8)},
    "cpu_conv.c": {"conv_forward": (3, 0, 6), "conv_backward_weight": (4, 0, 6)},
    "cpu_glu.c": {"glu_forward": (3, 0, 3), "glu_backward": (6, 0, 3)},
    "cpu_block.c": {"block_forward": (9, 3, 15)},
}


def block_weight_shapes(D: int, H: int, K: int) -> dict[str, tuple[int, ...]]:
    """The weights of a block, by their path in it, and their shapes for D channels, H hidden ones and K directions.

    This is the only list of them: the struct that the C kernel receives is made from it, with underscores for dots. All
    are attributes of the block, except the lower bound, which is an argument of its forward.
    """
    return {
        "norm1.weight": (D,),
        "norm1.bias": (D,),
        "mixer.in_proj.weight": (5 * D, D),
        "mixer.in_proj.bias": (5 * D,),
        "lower_bound": (D,),
        "mixer.theta": (K, D),
        "mixer.norm.weight": (2 * D,),
        "mixer.norm.bias": (2 * D,),
        "mixer.out_proj.weight": (D, 2 * D),
        "mixer.out_proj.bias": (D,),
        "norm2.weight": (D,),
        "norm2.bias": (D,),
        "mlp.fc1.weight": (2 * H, D),
        "mlp.fc1.bias": (2 * H,),
        "mlp.fc2.weight": (D, H),
        "mlp.fc2.bias": (D,),
    }


BLOCK_WEIGHTS = tuple(block_weight_shapes(1, 1, 1))
FLAGS = (
    "-O3",
    "-std=c11",
    "-fPIC",
    # not -ffast-math: merely loading such a library can make the whole process flush denormals, and it drops NaN checks
    "-fno-math-errno",
    "-fno-trapping-math",
    "-ffp-contract=fast",
    f"-DBD={BD}",
    f"-DCHUNK={CHUNK}",
    f"-DBAND={BAND}",
    f"-DROWS={ROWS}",
    "-DBLOCK_WEIGHTS=" + ",".join("*" + path.replace(".", "_") for path in BLOCK_WEIGHTS),
)


def unavailable(dtype: torch.dtype = torch.float32) -> str | None:
    """Why the kernels for a dtype cannot be used, or None if they can; builds them on the first call."""
    library = _library(dtype)
    return library if isinstance(library, str) else None


def call(name: str, like: torch.Tensor, *args: torch.Tensor | float) -> None:
    """Call a C function, compiled for the dtype of `like`."""
    library = _library(like.dtype)
    if isinstance(library, str):
        raise RuntimeError(f"the CPU kernels cannot be used: {library}")
    getattr(library, name)(*[_argument(a) for a in args])


def _argument(value):
    """What C receives: the address of the contents of a tensor, an array or a structure, or a number as it is."""
    if isinstance(value, torch.Tensor):
        return value.data_ptr()
    return ctypes.addressof(value) if isinstance(value, ctypes.Array | ctypes.Structure) else value


def threads(x: torch.Tensor) -> int:
    """Number of threads that the kernels use for x."""
    # below this size a second thread costs more than it saves; torch uses the same limit
    return torch.get_num_threads() if x.numel() >= 32768 else 1


@functools.cache
def _library(dtype: torch.dtype) -> ctypes.CDLL | str:
    """The library for a dtype, or the reason why there is none."""
    if sys.platform == "win32":
        return "they are not built on Windows"
    # the Fortran interface of BLAS has no bf16 matmul
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
