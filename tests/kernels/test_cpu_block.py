"""The launcher of the kernel for whole blocks: how work is shared, what it needs of BLAS, what it refuses."""

import ctypes
import threading
from types import SimpleNamespace

import pytest
import torch

from hgrn_vision.kernels import cpu_block, cpu_library

REASON = cpu_library.unavailable()
pytestmark = pytest.mark.skipif(
    bool(REASON) or not cpu_block.is_faster(torch.empty(1, 1, 32)), reason=f"no kernel for blocks here: {REASON}"
)


@pytest.mark.parametrize("B", [1, 2, 3, 5, 8, 23, 128])
@pytest.mark.parametrize("T", [1, 16, 49, 196, 600])
@pytest.mark.parametrize("threads", [1, 2, 3, 8])
def test_every_image_is_in_one_share(B, T, threads):
    shares = cpu_block._shares(B, T, threads)
    assert sum(images for images, _, _ in shares) == B
    for images, group, slices in shares:
        assert group <= images and (group < 2 or slices == 1 and group * T <= cpu_block.SLICE)
        # nobody waits long for others: in rounds of threads, most of them have something to do
        units = -(-images // group) if group else images * slices
        assert -(-units // threads) * threads <= 1.1 * units


def test_whole_images_go_to_each_thread_unless_many_threads_would_wait():
    # of 11 rounds, one thread is idle in the last
    assert cpu_block._shares(21, 196, 2) == [(21, 1, 1)]
    # of 2 rounds it would be a quarter of the time: both share the third image
    assert cpu_block._shares(3, 196, 2) == [(2, 1, 1), (1, 0, 2)]


def weights(D=32, H=40, K=2):
    return {path: torch.zeros(shape) for path, shape in cpu_library.block_weight_shapes(D, H, K).items()}


def test_weights_are_packed_where_many_matmuls_take_them(monkeypatch):
    monkeypatch.setattr(cpu_block, "_packed_size", lambda dtype, D, H, rows: 64)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)

    def packed(images, group, slices):
        x = torch.empty(images, 600, 32)
        return cpu_block._Share(x, weights(), 0, False, None, images, group, slices).buffers[0]

    assert packed(images=8, group=1, slices=1) == 4 * 64 and packed(images=7, group=1, slices=1) == 0
    assert packed(images=2, group=0, slices=4) == 4 * 64 and packed(images=15, group=2, slices=1) == 0


def test_weights_that_the_kernel_cannot_take():
    x, good = torch.empty(1, 4, 32), weights()
    assert cpu_block.fits(x, good) and cpu_block.fits(x, weights(K=1))
    assert not cpu_block.fits(x, weights(K=3)) and not cpu_block.fits(x, weights(D=64))
    for path in good:
        assert not cpu_block.fits(x, good | {path: good[path].double()}), path
        if path not in ("mixer.theta", "mlp.fc2.weight"):
            assert not cpu_block.fits(x, good | {path: good[path][1:]}), path


def test_memory_is_kept_for_the_next_block_unless_it_is_large(monkeypatch):
    monkeypatch.setattr(cpu_block, "_kept", threading.local())
    large, small = cpu_block._workspace(1000, torch.float32), cpu_block._workspace(900, torch.float32)
    assert large.data_ptr() == small.data_ptr()
    cpu_block.release_memory()
    assert cpu_block._kept.workspace is None
    assert cpu_block._workspace(10, torch.float64).dtype == torch.float64
    monkeypatch.setattr(cpu_block, "KEPT", 1000)
    cpu_block._workspace(1000, torch.float32)
    assert cpu_block._kept.workspace is None


@pytest.mark.parametrize("library", [{}, {"sgemm_": lambda *args: None}], ids=["missing", "wrong"])
def test_a_matmul_is_tried_before_it_is_used(monkeypatch, library):
    cpu_block._blas.cache_clear()
    monkeypatch.setattr(cpu_block.ctypes, "CDLL", lambda path: SimpleNamespace(**library))
    assert not cpu_block.is_faster(torch.empty(2, 9, 64))
    cpu_block._blas.cache_clear()
    monkeypatch.undo()
    assert cpu_block.is_faster(torch.empty(2, 9, 64))


def test_trying_the_matmul_leaves_random_numbers_alone():
    """A resumed run tries it at another step than an uninterrupted run, and must stay equal to it."""
    state = torch.get_rng_state()
    cpu_block._blas.cache_clear()
    assert cpu_block.is_faster(torch.empty(2, 9, 64))
    assert torch.equal(torch.get_rng_state(), state)


def test_packing_is_used_whole_or_not_at_all(monkeypatch):
    """A library that can pack weights but not multiply by them has none of it."""
    gemm = ctypes.cast(cpu_block._blas(torch.float32).gemm, ctypes.CFUNCTYPE(None))
    cpu_block._blas.cache_clear()
    half = SimpleNamespace(sgemm_=gemm, sgemm_pack_=gemm, sgemm_pack_get_size_=gemm)
    monkeypatch.setattr(cpu_block.ctypes, "CDLL", lambda path: half)
    found = cpu_block._blas(torch.float32)
    cpu_block._blas.cache_clear()
    assert found.gemm and not (found.pack or found.compute or found.packed_size)
