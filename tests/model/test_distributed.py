"""A model under DistributedDataParallel: two processes get the gradients of one on the whole batch."""

import timm
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel


def make():
    torch.manual_seed(0)
    model = timm.create_model("hgrn_deit_tiny", img_size=16, patch_size=8, embed_dim=16, depth=2, num_classes=4)
    return model.double(), torch.randn(4, 3, 16, 16, dtype=torch.float64)


def worker(rank, store, result):
    import hgrn_vision  # noqa: F401

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    model, x = make()
    model = DistributedDataParallel(model)
    model(x[2 * rank : 2 * rank + 2]).square().mean().backward()
    if rank == 0:
        torch.save({name: p.grad for name, p in model.module.named_parameters()}, result)
    dist.destroy_process_group()


def test_two_processes_equal_one(tmp_path, monkeypatch):
    import hgrn_vision  # noqa: F401

    result = tmp_path / "gradients.pt"
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    mp.spawn(worker, args=(tmp_path / "store", result), nprocs=2)
    model, x = make()
    model(x).square().mean().backward()
    got = torch.load(result)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(got[name], parameter.grad, msg=name)
