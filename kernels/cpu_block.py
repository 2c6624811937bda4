"""Launcher of the CPU kernel for whole blocks in inference (cpu_block.c), and the matrix products it is given."""

import ctypes
import functools
import threading
from pathlib import Path
from typing import NamedTuple

import torch

from .cpu_library import BLOCK, call
from .cpu_scan import channels_room, chunk_length

# tokens that a thread takes through a block at once: fewer make the products slower, more leave the cache
SLICE = 512
# bytes of memory to work in that a thread holds on to between blocks, at most
KEPT = 2**28
_kept = threading.local()
PRODUCTS = {torch.float32: "sgemm_", torch.float64: "dgemm_"}  # in the Fortran interface of BLAS


class BlockWeights(NamedTuple):
    """The weights of a block in the order of the C kernel; those of products are (out, in)."""

    norm1_weight: torch.Tensor
    norm1_bias: torch.Tensor
    in_weight: torch.Tensor
    in_bias: torch.Tensor
    lower_bound: torch.Tensor
    theta: torch.Tensor
    norm_weight: torch.Tensor
    norm_bias: torch.Tensor
    out_weight: torch.Tensor
    out_bias: torch.Tensor
    norm2_weight: torch.Tensor
    norm2_bias: torch.Tensor
    fc1_weight: torch.Tensor
    fc1_bias: torch.Tensor
    fc2_weight: torch.Tensor
    fc2_bias: torch.Tensor


def fits(x: torch.Tensor, weights: BlockWeights) -> bool:
    """Whether the weights have the dtype and the shapes that tokens x (B, T, D) need; the kernel trusts them."""
    D, H, K = x.shape[-1], weights.fc2_weight.shape[-1], weights.theta.shape[0]
    shapes = [(D,), (D,), (5 * D, D), (5 * D,), (D,), (K, D), (2 * D,), (2 * D,), (D, 2 * D), (D,)]
    shapes += [(D,), (D,), (2 * H, D), (2 * H,), (D, H), (D,)]
    return K in (1, 2) and all(w.shape == s and w.dtype == x.dtype for w, s in zip(weights, shapes, strict=True))


def has_block(x: torch.Tensor) -> bool:
    """Whether block_forward can run for such tokens x (B, T, D) here, and is faster than the layers one by one."""
    B, T, D = x.shape
    # each thread reads all weights, which for wide layers takes longer than the work on few tokens
    if D % BLOCK or x.dtype not in PRODUCTS or (D > 256 and torch.get_num_threads() * 64 > B * T):
        return False
    return B * T > 0 and _products(x.dtype) is not None


def block_forward(x: torch.Tensor, weights: BlockWeights, eps: tuple[float, float, float]) -> torch.Tensor:
    """A block of x (B, T, D) with an output gate, a hidden layer of any width, and the epsilons of its three norms."""
    x, weights = x.contiguous(), BlockWeights(*[weight.contiguous() for weight in weights])
    shares = [_Share(x, weights, *share) for share in _shares(*x.shape[:2], torch.get_num_threads())]
    room = _room(max(sum(share.rooms) for share in shares), x.dtype)
    out = torch.empty(x.shape, dtype=x.dtype)
    start = 0
    for share in shares:
        share.run(out[start:], x[start:], weights, eps, room)
        start += share.images
    return out


def _room(size: int, dtype: torch.dtype) -> torch.Tensor:
    """Memory to work in; this thread's next block finds it mapped and in cache, unless it is large."""
    room = getattr(_kept, "room", None)
    if room is None or room.dtype != dtype or room.numel() < size:
        room = torch.empty(size, dtype=dtype)
        _kept.room = room if room.nbytes <= KEPT else None
    return room


def release_memory() -> None:
    """Give back the memory that this thread has kept for its next block."""
    _kept.room = None


def _shares(B: int, T: int, threads: int) -> list[tuple[int, int, int]]:
    """How a batch is shared out: images, how many a thread takes at once, 0 if all share each, and its slices."""
    # small images go together, so that a product has enough rows, but no thread is left without
    most = max(1, SLICE // 2 // T)
    group = -(-B // (threads * -(-B // (threads * most))))
    units = -(-B // group)
    slices = -(-T // SLICE)
    # whole images are faster, as nobody waits for others in between, but only where they go round
    if -(-units // threads) * threads <= 1.1 * units:
        return [(B, group, slices)]
    shares = [(B - B % threads, 1, slices), (B % threads, 0, -(-slices // threads) * threads)]
    return [share for share in shares if share[0]]


class _Share:
    """Images of a batch that one call of the kernel takes."""

    def __init__(self, x: torch.Tensor, weights: BlockWeights, images: int, group: int, slices: int):
        T, D = x.shape[1:]
        H, K, length = weights.fc2_weight.shape[1], weights.theta.shape[0], chunk_length(T)
        # all of them also for few tokens: in a team of one, the products would start threads of their own
        threads, chunks = torch.get_num_threads(), -(-T // length)
        per_slice = -(-chunks // min(slices, chunks))
        rows = per_slice * length * max(group, 1)
        # for few products it is quicker to let each pack its weight by itself
        packs = images * slices >= 4 * threads * max(group, 1)
        per_linear = _packed_size(x.dtype, D, H, rows) if packs else 0
        per_thread = rows * (max(2 * D, H) + 2 * max(D, H))
        per_image = 8 * T * D + chunks * (1 + 2 * K) * D
        self.images = images
        self.rooms = 4 * per_linear, threads * per_thread, (threads * group or images) * per_image
        self.sizes = images, T, D, H, K, length, per_slice, group, per_linear, per_thread, per_image, threads

    def run(self, out: torch.Tensor, x: torch.Tensor, weights: BlockWeights, eps, room: torch.Tensor) -> None:
        pointers = (ctypes.c_void_p * len(weights))(*[weight.data_ptr() for weight in weights])
        rooms = room[: sum(self.rooms)].split(self.rooms)
        tensors = x, pointers, _products(x.dtype), channels_room(weights.lower_bound), *rooms, out
        call("block_forward", x, *tensors, *eps, *self.sizes)


class Products(ctypes.Structure):
    """The matrix products of the BLAS library that torch uses; the last three are MKL's, or null."""

    _fields_ = [(name, ctypes.c_void_p) for name in ("gemm", "pack", "compute", "packed_size")]


@functools.cache
def _products(dtype: torch.dtype) -> Products | None:
    """The library's products, or None where they cannot be found or used."""
    try:
        library = ctypes.CDLL(str(next((Path(torch.__file__).parent / "lib").glob("libtorch_cpu.*"))))
        gemm = getattr(library, PRODUCTS[dtype])
    except (StopIteration, OSError, AttributeError):
        return None
    a, b = torch.arange(15, dtype=dtype).view(5, 3), torch.arange(12, dtype=dtype).view(4, 3)
    got = torch.ones(5, 4, dtype=dtype)
    one = ctypes.byref((ctypes.c_double if dtype == torch.float64 else ctypes.c_float)(1))
    n, m, k = (ctypes.byref(ctypes.c_int64(size)) for size in (4, 5, 3))
    p_a, p_b, p_got = (ctypes.c_void_p(tensor.data_ptr()) for tensor in (a, b, got))
    gemm(b"T", b"N", n, m, k, one, p_b, k, p_a, k, one, p_got, n)
    if not torch.equal(got, a @ b.t() + 1):  # whole numbers: every library gives the same
        return None
    names = [PRODUCTS[dtype] + name for name in ("pack_", "compute_", "pack_get_size_")]
    packing = [getattr(library, name, None) for name in names]
    return Products(*[ctypes.cast(function, ctypes.c_void_p) for function in [gemm, *packing * all(packing)]])


@functools.cache
def _packed_size(dtype: torch.dtype, D: int, H: int, n: int) -> int:
    """Elements of the largest packed weight of a block for products of n tokens."""
    address = _products(dtype).packed_size
    if not address:
        return 0
    size = ctypes.CFUNCTYPE(ctypes.c_size_t, ctypes.c_char_p, *[ctypes.POINTER(ctypes.c_int64)] * 3)(address)
    shapes = (5 * D, D), (D, 2 * D), (2 * H, D), (D, H)
    bytes_needed = max(size(b"A", *[ctypes.c_int64(side) for side in (width, n, k)]) for width, k in shapes)
    return -(-bytes_needed // 64) * 64 // dtype.itemsize  # whole cache lines
