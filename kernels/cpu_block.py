"""Launcher of the CPU kernel for whole blocks in inference (cpu_block.c), which calls the matmuls of torch's BLAS."""

import ctypes
import functools
import threading
from collections.abc import Mapping
from operator import attrgetter
from pathlib import Path

import torch

from .cpu_conv import by_tap
from .cpu_library import BD, BLOCK_WEIGHTS, block_weight_shapes, call
from .cpu_scan import channels_buffer, chunk_length

# tokens that a thread takes through a block at once: with fewer, matmuls are slower; more do not stay in cache
SLICE = 512
# the largest workspace, in bytes, that a thread keeps between blocks
KEPT = 2**28
_kept = threading.local()
GEMM = {torch.float32: "sgemm_", torch.float64: "dgemm_"}  # in the Fortran interface of BLAS
_GETTERS = {path: attrgetter(path) for path in BLOCK_WEIGHTS if path != "lower_bound"}


def is_faster(x: torch.Tensor) -> bool:
    """Whether forward can run for tokens x (B, T, D) here and is faster than the layers one by one."""
    B, T, D = x.shape
    # each thread reads all weights, which in wide layers takes longer than the work on a few tokens
    if D % BD or x.dtype not in GEMM or (D > 256 and torch.get_num_threads() * 64 > B * T):
        return False
    return B * T > 0 and _blas(x.dtype) is not None


def weights_of(block: torch.nn.Module, lower_bound: torch.Tensor) -> dict[str, torch.Tensor | None]:
    """The weights that forward takes, by their path in the block; None for those that the block lacks."""
    found = {path: get(block) for path, get in _GETTERS.items()}
    return {path: found.get(path, lower_bound) for path in BLOCK_WEIGHTS}


def fits(x: torch.Tensor, weights: Mapping[str, torch.Tensor]) -> bool:
    """Whether the weights have the dtype and the shapes that tokens x (B, T, D) need; the kernel does not check."""
    D, H, K = _sizes(x, weights)
    shapes = block_weight_shapes(D, H, K)
    return K in (1, 2) and all(w.shape == shapes[path] and w.dtype == x.dtype for path, w in weights.items())


def forward(
    x: torch.Tensor,
    weights: Mapping[str, torch.Tensor],
    eps: tuple[float, float, float],
    grid: tuple[int, int] | None = None,
    rows_and_columns: bool = False,
    conv: torch.Tensor | None = None,
) -> torch.Tensor:
    """The block's output for tokens x (B, T, D); `eps` are the epsilons of norm1, of the mixer's norm and of norm2.

    The mixer scans all tokens as one sequence, or the rows and columns of their grid; `conv` (D, 1, side, side) is the
    weight of its local convolution, if it has one.
    """
    x, weights = x.contiguous(), {path: weight.contiguous() for path, weight in weights.items()}
    taps = None if conv is None else by_tap(conv, x.dtype)
    layout = 0 if grid is None else grid[1], rows_and_columns, taps
    shares = [_Share(x, weights, *layout, *share) for share in _shares(*x.shape[:2], torch.get_num_threads())]
    workspace = _workspace(max(sum(share.buffers) for share in shares), x.dtype)
    out = torch.empty(x.shape, dtype=x.dtype)
    start = 0
    for share in shares:
        share.run(out[start:], x[start:], weights, eps, workspace)
        start += share.images
    return out


def _sizes(x: torch.Tensor, weights: Mapping[str, torch.Tensor]) -> tuple[int, int, int]:
    """Channels D, hidden channels H and directions K."""
    return x.shape[-1], weights["mlp.fc2.weight"].shape[-1], weights["mixer.theta"].shape[0]


def _workspace(size: int, dtype: torch.dtype) -> torch.Tensor:
    """A workspace; unless it is large, the thread keeps it, so that its next block finds it mapped and in cache."""
    workspace = getattr(_kept, "workspace", None)
    if workspace is None or workspace.dtype != dtype or workspace.numel() < size:
        workspace = torch.empty(size, dtype=dtype)
        _kept.workspace = workspace if workspace.nbytes <= KEPT else None
    return workspace


def release_memory() -> None:
    """Free the memory that this thread has kept for its next block."""
    _kept.workspace = None


def _shares(B: int, T: int, threads: int) -> list[tuple[int, int, int]]:
    """How a batch is split: images, how many a thread takes at once (0 if all threads share each), slices per image."""
    # small images are grouped so that a matmul has enough rows, but never so that a thread is left idle
    most = max(1, SLICE // 2 // T)
    group = -(-B // (threads * -(-B // (threads * most))))
    units = -(-B // group)
    slices = -(-T // SLICE)
    # whole images are faster, as threads do not wait for each other in between, but only if they divide evenly
    if -(-units // threads) * threads <= 1.1 * units:
        return [(B, group, slices)]
    shares = [(B - B % threads, 1, slices), (B % threads, 0, -(-slices // threads) * threads)]
    return [share for share in shares if share[0]]


class _Share:
    """Images of a batch that go to one call of the kernel."""

    def __init__(
        self,
        x: torch.Tensor,
        weights: Mapping[str, torch.Tensor],
        width: int,
        rows_and_columns: bool,
        taps: torch.Tensor | None,
        images: int,
        group: int,
        slices: int,
    ):
        T, (D, H, K) = x.shape[1], _sizes(x, weights)
        length = width if rows_and_columns else chunk_length(T)
        # all threads even for few tokens: in a team of one, the matmuls would start threads of their own
        threads, chunks = torch.get_num_threads(), -(-T // length)
        per_slice = -(-chunks // min(slices, chunks))
        rows = per_slice * length * max(group, 1)
        # for few matmuls it is faster to let each of them pack the weight itself
        packs = images * slices >= 4 * threads * max(group, 1)
        per_linear = _packed_size(x.dtype, D, H, rows) if packs else 0
        per_thread = rows * (max(2 * D, H) + 2 * max(D, H))
        # a grid has no states to carry from chunk to chunk
        per_image = (8 if taps is None else 9) * T * D + (0 if rows_and_columns else chunks * (1 + 2 * K) * D)
        self.images, self.taps = images, taps
        self.buffers = 4 * per_linear, threads * per_thread, (threads * group or images) * per_image
        sizes = images, T, D, H, K, length, per_slice, group, per_linear, per_thread, per_image
        self.sizes = *sizes, int(rows_and_columns), width, 0 if taps is None else taps.shape[0], threads

    def run(
        self,
        out: torch.Tensor,
        x: torch.Tensor,
        weights: Mapping[str, torch.Tensor],
        eps: tuple[float, float, float],
        workspace: torch.Tensor,
    ) -> None:
        pointers = (ctypes.c_void_p * len(weights))(*[weights[path].data_ptr() for path in BLOCK_WEIGHTS])
        buffers = workspace[: sum(self.buffers)].split(self.buffers)
        taps = x if self.taps is None else self.taps  # not read then
        tensors = x, pointers, taps, _blas(x.dtype), channels_buffer(weights["lower_bound"]), *buffers, out
        call("block_forward", x, *tensors, *eps, *self.sizes)


class Blas(ctypes.Structure):
    """The matmuls of the BLAS library that torch uses; the last three are MKL's, or null."""

    _fields_ = [(name, ctypes.c_void_p) for name in ("gemm", "pack", "compute", "packed_size")]


@functools.cache
def _blas(dtype: torch.dtype) -> Blas | None:
    """The matmuls of torch's BLAS library, or None if they cannot be found or do not work."""
    try:
        library = ctypes.CDLL(str(next((Path(torch.__file__).parent / "lib").glob("libtorch_cpu.*"))))
        gemm = getattr(library, GEMM[dtype])
    except (StopIteration, OSError, AttributeError):
        return None
    a, b = torch.arange(15, dtype=dtype).view(5, 3), torch.arange(12, dtype=dtype).view(4, 3)
    got = torch.ones(5, 4, dtype=dtype)
    one = ctypes.byref((ctypes.c_double if dtype == torch.float64 else ctypes.c_float)(1))
    n, m, k = (ctypes.byref(ctypes.c_int64(size)) for size in (4, 5, 3))
    p_a, p_b, p_got = (ctypes.c_void_p(tensor.data_ptr()) for tensor in (a, b, got))
    gemm(b"T", b"N", n, m, k, one, p_b, k, p_a, k, one, p_got, n)
    if not torch.equal(got, a @ b.t() + 1):  # small integers: exact in every library
        return None
    names = [GEMM[dtype] + name for name in ("pack_", "compute_", "pack_get_size_")]
    packing = [getattr(library, name, None) for name in names]
    return Blas(*[ctypes.cast(function, ctypes.c_void_p) for function in [gemm, *packing * all(packing)]])


@functools.cache
def _packed_size(dtype: torch.dtype, D: int, H: int, n: int) -> int:
    """Elements of the largest packed weight of a block for matmuls of n tokens."""
    address = _blas(dtype).packed_size
    if not address:
        return 0
    size = ctypes.CFUNCTYPE(ctypes.c_size_t, ctypes.c_char_p, *[ctypes.POINTER(ctypes.c_int64)] * 3)(address)
    matrices = [shape for path, shape in block_weight_shapes(D, H, 1).items() if path.endswith(".weight") and shape[1:]]
    bytes_needed = max(size(b"A", *[ctypes.c_int64(side) for side in (width, n, k)]) for width, k in matrices)
    return -(-bytes_needed // 64) * 64 // dtype.itemsize  # whole cache lines
