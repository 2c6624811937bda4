"""Which backend runs, by device, dtype, name and environment; the operators under PyTorch's own checks."""

import inspect
import logging
import subprocess
import sys
from pathlib import Path

import pytest
import timm
import torch
from scan_cases import inputs, relative_error, with_grads
from timm.layers import set_exportable, set_scriptable
from torch.utils._python_dispatch import TorchDispatchMode

from hgrn_vision import backend, hgru_scan, set_backend
from hgrn_vision.glu import _glu, _glu_backward, glu
from hgrn_vision.kernels import cpu_block, cpu_glu, cpu_scan, reference
from hgrn_vision.scan import _scan, _scan_backward

ROOT = Path(__file__).resolve().parents[2]
MODEL = dict(img_size=16, patch_size=8, embed_dim=32, depth=2, num_classes=3)


@pytest.fixture(autouse=True)
def automatic(monkeypatch):
    monkeypatch.delenv(backend.ENVIRONMENT, raising=False)
    monkeypatch.setattr(backend, "_chosen", None)


def resolved(dtype=torch.float32, name=None):
    return backend.backend_for(torch.empty(1, dtype=dtype), name)


@pytest.mark.parametrize("name, operation", [(name, op) for name, row in backend.TABLE.items() for op in row.modules])
def test_a_backends_modules_keep_to_the_contract(name, operation):
    """Every function of the operation's protocol exists, with the same parameters in the same order."""
    module = backend.kernels(name, operation)
    contract = {
        key: value for key, value in vars(backend.OPERATIONS[operation]).items() if isinstance(value, staticmethod)
    }
    assert contract
    for function, declared in contract.items():
        got, want = (inspect.signature(f).parameters for f in (getattr(module, function), declared.__func__))
        assert list(got) == list(want), function


def test_operations_are_looked_up_by_name():
    offers = {name: [op for op in backend.OPERATIONS if backend.has_kernels(name, op)] for name in backend.TABLE}
    assert offers == {"triton": ["scan"], "cpu": ["scan", "glu", "conv", "block"], "torch": []}
    assert backend.kernels("cpu", "glu") is cpu_glu and backend.kernels("cpu", "scan") is cpu_scan
    with pytest.raises(KeyError, match="glu"):
        backend.kernels("triton", "glu")


def test_auto_follows_device_and_dtype(caplog):
    backend.choose.cache_clear()
    with caplog.at_level(logging.INFO, logger="hgrn_vision"):
        for _ in range(2):
            assert resolved(torch.float32) == resolved(torch.float64) == resolved(torch.bfloat16) == "cpu"
            assert resolved(torch.float16) == "torch"
            assert backend.choose(torch.device("mps"), torch.float32) == "torch"
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == len(set(messages)) == 5  # each choice is logged once
    assert "torch backend for torch.float16 on cpu: cpu cannot run, it has no kernels for torch.float16" in messages


def test_set_backend_as_statement_and_as_context():
    set_backend("torch")
    assert resolved() == "torch"
    with set_backend("cpu"):
        assert resolved() == "cpu"
        with set_backend("auto"):
            assert resolved() == "cpu"
    assert resolved() == "torch"


def test_the_environment_is_a_default_only(monkeypatch):
    monkeypatch.setenv(backend.ENVIRONMENT, "torch")
    assert resolved() == "torch"
    assert resolved(name="cpu") == "cpu"
    with set_backend("cpu"):
        assert resolved() == "cpu"
    monkeypatch.setenv(backend.ENVIRONMENT, "")
    assert resolved() == backend.choose(torch.device("cpu"), torch.float32)
    monkeypatch.setenv(backend.ENVIRONMENT, "fast")
    with pytest.raises(ValueError, match="HGRN_VISION_BACKEND: backend must be one of auto, triton, cpu, torch"):
        resolved()


def test_a_backend_asked_for_by_name_raises_where_it_cannot_run():
    with pytest.raises(RuntimeError, match="'triton' was requested but cannot run: it has no kernels for cpu"):
        hgru_scan(*inputs(1, 2, 3, 2, 5), backend="triton")
    with pytest.raises(RuntimeError, match="no kernels for torch.float16"):
        hgru_scan(*inputs(1, 2, 3, 2, 5, dtype=torch.float16), backend="cpu")
    with pytest.raises(ValueError, match="must be one of"):
        set_backend("cuda")


def test_a_backend_whose_modules_cannot_be_imported_says_why(monkeypatch):
    def missing(backend, operation):
        raise ImportError("No module named 'triton'")

    monkeypatch.setattr(backend, "kernels", missing)
    monkeypatch.setattr(backend, "unavailable", backend.unavailable.__wrapped__)
    assert backend.unavailable("triton") == "No module named 'triton'"
    assert backend.choose.__wrapped__(torch.device("cuda"), torch.float32) == "torch"


def record_kernels(monkeypatch):
    """A list that records the name of every CPU kernel called from now on."""
    calls = []
    kernels = [(cpu_scan, "forward"), (cpu_scan, "backward"), (cpu_glu, "forward"), (cpu_glu, "backward")]
    for module, name in [*kernels, (cpu_block, "forward")]:
        prefix = {cpu_scan: "", cpu_glu: "glu_", cpu_block: "block_"}[module]
        kernel, called = getattr(module, name), prefix + name
        monkeypatch.setattr(module, name, lambda *a, k=kernel, n=called: (calls.append(n), k(*a))[1])
    return calls


@pytest.mark.parametrize("mode", ["scriptable", "exportable"])
def test_models_for_scripting_and_export_keep_to_plain_operations(mode, monkeypatch):
    model = timm.create_model("hgrn_deit_tiny", **MODEL, **{mode: True})
    calls = record_kernels(monkeypatch)
    model(torch.randn(1, 3, 16, 16))
    with torch.no_grad():
        model(torch.randn(1, 3, 16, 16))
    assert calls == []


@pytest.mark.parametrize("setting", [set_scriptable, set_exportable])
def test_operations_for_scripting_and_export_are_plain_too(setting):
    usual = resolved()
    with setting(True):
        assert resolved() == "torch"
    assert resolved() == usual


def test_modes_see_the_operation():
    """FLOP counters and fake tensors work by modes, which a kernel called directly would bypass."""
    seen = []

    class Recorder(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    arguments = inputs(1, 3, 2, 1, 3, dtype=torch.float32, grad=False)
    with Recorder():
        hgru_scan(*arguments, backend="cpu")
    assert torch.ops.hgrn_vision.scan.default in seen


def test_tensors_of_other_classes_are_for_the_dispatcher():
    """They may be sharded, quantized or fake, and have no memory that a kernel could read."""

    class Other(torch.Tensor):
        pass

    plain = torch.empty(2)
    assert not backend.needs_dispatcher(plain, None, torch.nn.Parameter(plain, requires_grad=False))
    assert backend.needs_dispatcher(plain, plain.as_subclass(Other)) and backend.needs_dispatcher(plain.to("meta"))
    assert backend.needs_dispatcher(torch.nn.Parameter(plain))
    with torch.no_grad():
        assert not backend.needs_dispatcher(torch.nn.Parameter(plain))


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_transforms_see_the_operation():
    x, *parameters = inputs(6, 3, 2, 2, 5, dtype=torch.float32, grad=False)
    got = torch.func.vmap(lambda part: hgru_scan(part, *parameters, backend="cpu"))(x.unflatten(0, (3, 2)))
    assert torch.equal(got.flatten(0, 1), hgru_scan(x, *parameters, backend="cpu"))


def test_tracing_records_plain_operations():
    model = timm.create_model("hgrn_deit_tiny", **MODEL).eval()
    x = torch.randn(2, 3, 16, 16)
    with torch.no_grad():
        traced = torch.jit.trace(model, torch.randn(2, 3, 16, 16))
        torch.testing.assert_close(traced(x), model(x), rtol=1e-4, atol=1e-5)
    assert {node.kind().split("::")[0] for node in traced.inlined_graph.nodes()} <= {"aten", "prim"}


def test_kernels_run_with_and_without_gradients(monkeypatch):
    """The model really uses the kernels, not the fallback."""
    calls = record_kernels(monkeypatch)
    model = timm.create_model("hgrn_deit_tiny", **MODEL)
    x = torch.randn(1, 3, 16, 16)
    with torch.no_grad():
        model(x)
    assert calls == ["block_forward"] * 2
    calls.clear()
    model(x).sum().backward()
    assert calls[:4] == ["forward", "glu_forward"] * 2
    # the activation of the GLU is not saved but recomputed
    assert sorted(calls[4:]) == sorted(["backward", "glu_backward", "glu_forward"] * 2)


@pytest.mark.parametrize("name", ["cpu", "torch"])
@pytest.mark.parametrize("width, bias", [(10, 8), (10, 1), (9, 9)])
def test_glu_refuses_a_bias_of_another_width(name, width, bias):
    with pytest.raises(ValueError, match=rf"glu: .* got \(2, {width}\) with a bias \({bias},\)"):
        glu(torch.randn(2, width), torch.randn(bias), name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_operators_pass_pytorchs_checks(dtype):
    args = inputs(2, 35, 5, 2, 5, dtype=dtype)
    torch.library.opcheck(_scan, (*args, "cpu", 0))
    plain = [t.detach() for t in args]
    out, states = _scan(*plain, "cpu", 0)
    torch.library.opcheck(_scan_backward, (torch.randn_like(out), *plain, states, "cpu", 0))
    x, bias = torch.randn(3, 4, 10, dtype=dtype, requires_grad=True), torch.randn(10, dtype=dtype, requires_grad=True)
    torch.library.opcheck(_glu, (x, bias, "cpu"))
    torch.library.opcheck(_glu_backward, (torch.randn(3, 4, 5, dtype=dtype), x.detach(), bias.detach(), "cpu"))


def test_double_backward_raises():
    x, *rest = inputs(1, 3, 2, 2, 5)
    (dx,) = torch.autograd.grad(hgru_scan(x, *rest, backend="cpu").sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="backward through hgrn_vision.scan_backward"):
        dx.sum().backward()


def test_meta_tensors():
    args = [t.to("meta") for t in inputs(2, 40, 6, 2, 5)]
    assert hgru_scan(*args).shape == (2, 40, 12)
    # whoever plans a model for another machine has its kernels not here
    assert hgru_scan(*args, backend="triton").is_meta and hgru_scan(*args, backend="cpu").is_meta
    assert timm.create_model("hgrn_deit_tiny", **MODEL, device="meta")(torch.empty(2, 3, 16, 16, device="meta")).is_meta


@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
def test_compiled_scan_matches_reference(compiler):
    args = inputs(2, 20, 6, 2, 5, dtype=torch.float32)
    torch._dynamo.reset()
    got = with_grads(torch.compile(hgru_scan, fullgraph=True, backend=compiler), *args)
    want = with_grads(reference.hgru_scan, *args)
    for name in want:
        assert relative_error(got[name], want[name]) < 1e-5, name


def test_autocast_runs_the_scan_in_bfloat16():
    model = timm.create_model("hgrn_deit_tiny", **MODEL)
    seen = []
    kernels = backend.kernels("cpu", "scan")
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.MonkeyPatch.context() as patch:
        forward = kernels.forward
        patch.setattr(kernels, "forward", lambda x, *rest: (seen.append(x.dtype), forward(x, *rest))[1])
        model(torch.randn(1, 3, 16, 16))
    assert set(seen) == {torch.bfloat16}


def test_glu_matches_its_definition():
    x, bias = torch.randn(3, 5, 14, dtype=torch.float64), torch.randn(14, dtype=torch.float64)
    a, v = (x + bias).chunk(2, dim=-1)
    want = a * torch.sigmoid(a) * v
    for name in ("cpu", "torch"):
        torch.testing.assert_close(glu(x, bias, name), want)
        assert torch.autograd.gradcheck(
            lambda x, b, name=name: glu(x, b, name), (x.requires_grad_(), bias.requires_grad_())
        )


def test_a_broken_compiler_falls_back_and_says_why(tmp_path):
    code = """
import logging, timm, torch
logging.basicConfig(level=logging.INFO)
import hgrn_vision
model = timm.create_model("hgrn_deit_tiny", img_size=16, patch_size=8, embed_dim=32, depth=3)
print(torch.isfinite(model(torch.randn(1, 3, 16, 16))).all().item())
try:
    with hgrn_vision.set_backend("cpu"):
        model(torch.randn(1, 3, 16, 16))
except RuntimeError as error:
    print(error)
"""
    env = {"CC": "/bin/false", "XDG_CACHE_HOME": str(tmp_path), "PYTHONPATH": str(ROOT), "HOME": str(tmp_path)}
    result = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    finite, error = result.stdout.splitlines()
    assert finite == "True"
    assert "'cpu' was requested but cannot run" in error and "/bin/false" in error
    said = [line for line in result.stderr.splitlines() if line.startswith("INFO:hgrn_vision")]
    assert len(said) == 1 and "torch backend" in said[0] and "/bin/false" in said[0]


def test_memory_of_training_is_that_of_the_kept_tensors():
    """Autograd saves the inputs of the scan and the GLU, and recomputes what follows cheaply."""
    B, T, D = 2, 64, 32
    model = timm.create_model("hgrn_deit_tiny", img_size=64, patch_size=8, embed_dim=D, depth=1, num_classes=3)
    block = model.blocks[0]
    kept = {}

    weights = {parameter.untyped_storage().data_ptr() for parameter in block.parameters()}

    def pack(tensor):
        if tensor.untyped_storage().data_ptr() not in weights:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    x = torch.randn(B, T, D, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        block(x, torch.rand(D)).sum().backward()
    units = sum(kept.values()) / (4 * B * T * D)
    # x, two norms of D, the scan's 5D and 2D, the GLU's 4D, the sum after the mixer
    assert 14 < units < 15.5
