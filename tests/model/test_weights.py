"""Converting the authors' released layout to ours, checked against their equations; clear errors on loading."""

import argparse
import math

import pytest
import safetensors.torch
import timm
import torch
import torch.nn.functional as F

from hgrn_vision import load_checkpoint
from hgrn_vision.hgrn import checkpoint_filter_fn

DEPTH, D, PATCH, CLASSES = 3, 8, 4, 5


def ours(name="hgrn1d_vit_tiny", **kwargs):
    args = dict(img_size=16, patch_size=PATCH, embed_dim=D, depth=DEPTH, num_classes=CLASSES)
    return timm.create_model(name, **{**args, **kwargs}).eval()


def released_state_dict(depth=DEPTH, d=D, classes=CLASSES):
    shapes = {"lower_bounds": (depth, d), "to_patch_embedding.1": (d, PATCH * PATCH * 3), "head.1": (classes, d)}
    for i in range(depth):
        mixer, feature = f"layers.{i}.token_mixer.", f"layers.{i}.feature_mixer."
        shapes |= {f"{mixer}theta_forward": (1, 1, d), f"{mixer}theta_reverse": (1, 1, d)}
        shapes |= {f"{mixer}input_proj": (2 * d, d), f"{mixer}lambda_proj": (d, d), f"{mixer}gate": (2 * d, d)}
        shapes |= {f"{mixer}norm": (2 * d,), f"{mixer}out_proj": (d, 2 * d)}
        shapes |= {f"layers.{i}.token_norm": (d,), f"layers.{i}.feature_norm": (d,)}
        shapes |= {f"{feature}l1": (2 * d, d), f"{feature}l2": (2 * d, d), f"{feature}l3": (d, 2 * d)}
    state = {}
    for name, shape in shapes.items():
        if name == "lower_bounds" or "theta" in name:
            state[name] = torch.randn(shape)
        else:
            state[f"{name}.weight"] = 0.5 * torch.randn(shape) + (1.0 if len(shape) == 1 else 0.0)
            state[f"{name}.bias"] = 0.5 * torch.randn(shape[0])
    return state


def released_forward(state, image):
    """The released image model's equations in float64, from its own tensors."""
    p = {name: tensor.double() for name, tensor in state.items()}

    def linear(x, name):
        return x @ p[f"{name}.weight"].T + p[f"{name}.bias"]

    def norm(x, name):
        return F.layer_norm(x, x.shape[-1:], p[f"{name}.weight"], p[f"{name}.bias"], 1e-5)

    B, C, H, W = image.shape
    rows, columns = H // PATCH, W // PATCH
    patches = image.double().reshape(B, C, rows, PATCH, columns, PATCH).permute(0, 2, 4, 3, 5, 1)
    x = linear(patches.reshape(B, rows * columns, -1), "to_patch_embedding.1")
    bounds = p["lower_bounds"].softmax(dim=0)
    bounds = bounds.cumsum(dim=0) - bounds  # the running sum without the layer itself
    for i in range(len(bounds)):
        mixer, feature = f"layers.{i}.token_mixer.", f"layers.{i}.feature_mixer."
        y = norm(x, f"layers.{i}.token_norm")
        pairs = F.silu(linear(y, f"{mixer}input_proj")).unflatten(-1, (-1, 2))
        c = torch.complex(pairs[..., 0], pairs[..., 1])
        decay = bounds[i] + (1 - bounds[i]) * torch.sigmoid(linear(y, f"{mixer}lambda_proj"))
        total = torch.zeros_like(c)
        for direction in ("forward", "reverse"):
            turn = torch.exp(1j * p[f"{mixer}theta_{direction}"].flatten())
            h = torch.zeros_like(c[:, 0])
            steps = range(c.shape[1])
            for t in steps if direction == "forward" else reversed(steps):
                h = decay[:, t] * turn * h + (1 - decay[:, t]) * c[:, t]
                total[:, t] += h
        states = norm(torch.cat([total.real, total.imag], dim=-1), f"{mixer}norm")
        x = x + linear(states * F.silu(linear(y, f"{mixer}gate")), f"{mixer}out_proj")
        y = norm(x, f"layers.{i}.feature_norm")
        x = x + linear(F.silu(linear(y, f"{feature}l1")) * linear(y, f"{feature}l2"), f"{feature}l3")
    x = x.mean(dim=1)
    x = x / (x.norm(dim=-1, keepdim=True) / math.sqrt(x.shape[-1]) + 1e-8)
    return linear(x, "head.1")


@pytest.mark.parametrize("wrapped", [False, True])
def test_released_checkpoint_computes_the_released_equations(wrapped, tmp_path):
    state = released_state_dict()
    path = tmp_path / "checkpoint.pth"
    extra = dict(optimizer={"lr": 0.1}, epoch=299, args=argparse.Namespace(lr=5e-4, model="hgrn1d_vit_tiny"))
    torch.save(dict(model=state, **extra) if wrapped else state, path)
    model = ours()
    assert load_checkpoint(model, path) == []
    image = torch.randn(2, 3, 16, 24)
    assert (model.double()(image.double()) - released_forward(state, image)).abs().max() < 1e-10


def test_released_layout_of_the_full_model_has_269_tensors():
    state = released_state_dict(depth=12)
    assert len(state) == 269
    own = ours(depth=12).state_dict()
    converted = checkpoint_filter_fn({"model": state}, ours(depth=12))
    assert {k: v.shape for k, v in converted.items()} == {k: v.shape for k, v in own.items()}


def test_the_released_gate_is_not_the_papers(tmp_path):
    path = tmp_path / "checkpoint.pth"
    torch.save(released_state_dict(), path)
    released, paper = ours(), ours("hgrn_deit_tiny")
    load_checkpoint(released, path)
    load_checkpoint(paper, path)
    image = torch.randn(1, 3, 16, 16)
    assert (released(image) - paper(image)).abs().max() > 1e-3


@pytest.mark.parametrize("kind", ["safetensors", "pth", "ddp", "ema"])
def test_own_checkpoints(kind, tmp_path):
    model = ours()
    state = model.state_dict()
    path = tmp_path / f"model.{'safetensors' if kind == 'safetensors' else 'pth'}"
    if kind == "safetensors":
        safetensors.torch.save_file(state, path)
    elif kind == "ddp":
        torch.save({"state_dict": {f"module.{k}": v for k, v in state.items()}}, path)
    elif kind == "ema":
        torch.save({"state_dict": {k: torch.zeros_like(v) for k, v in state.items()}, "state_dict_ema": state}, path)
    else:
        torch.save(state, path)
    other = ours()
    load_checkpoint(other, path)
    assert all(torch.equal(state[k], v) for k, v in other.state_dict().items())


def saved(model, path):
    torch.save(model.state_dict(), path)
    return path


def test_another_patch_size_is_resampled(tmp_path):
    model, coarse = ours(), ours(patch_size=8, img_size=32)
    load_checkpoint(coarse, saved(model, tmp_path / "c.pth"))
    # an image twice as large gives nearly the same tokens
    image = F.interpolate(torch.randn(1, 3, 4, 4), size=16, mode="bicubic")
    large = F.interpolate(image, scale_factor=2, mode="bicubic")
    (tokens, _), (coarse_tokens, _) = model.embed(image), coarse.embed(large)
    assert (tokens - coarse_tokens).abs().max() < 0.1 * tokens.abs().max()


def test_another_number_of_channels_is_adapted(tmp_path):
    model, grey = ours(), ours(in_chans=1)
    load_checkpoint(grey, saved(model, tmp_path / "c.pth"))
    torch.testing.assert_close(grey.patch_embed.proj.weight, model.patch_embed.proj.weight.sum(1, keepdim=True))


def test_a_head_of_another_class_count_is_dropped_on_request(tmp_path):
    model, other = ours(), ours(num_classes=3)
    path = saved(model, tmp_path / "c.pth")
    before = other.head.weight.clone()
    with pytest.raises(ValueError, match=r"head.weight is \(5, 8\), the model's \(3, 8\).*drop_head=True"):
        load_checkpoint(other, path)
    assert sorted(load_checkpoint(other, path, drop_head=True)) == ["head.bias", "head.weight"]
    assert torch.equal(other.head.weight, before)
    assert torch.equal(other.lower_bound, model.lower_bound)
    assert load_checkpoint(ours(), path, drop_head=True) == []
    assert load_checkpoint(ours(num_classes=0), path, drop_head=True) == []


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(embed_dim=16), r"lower_bound is \(3, 8\), the model's \(3, 16\).* and \d+ more"),
        (dict(depth=4), r"lower_bound is \(3, 8\), the model's \(4, 8\); blocks.3.norm1.weight is missing"),
        (dict(depth=2), r"blocks.2.norm1.weight is not in the model"),
        (dict(bidirectional=False), r"blocks.0.mixer.theta is \(2, 8\), the model's \(1, 8\)"),
    ],
)
def test_a_checkpoint_with_other_shapes(change, message, tmp_path):
    path = saved(ours(), tmp_path / "c.pth")
    model = ours(**change)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    with pytest.raises(ValueError, match=message) as error:
        load_checkpoint(model, path)
    assert "\n" not in str(error.value)
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())


def test_nan_weights(tmp_path):
    model = ours()
    with torch.no_grad():
        model.blocks[1].mlp.fc1.weight[0, 0] = math.nan
    with pytest.raises(ValueError, match="blocks.1.mlp.fc1.weight holds values that are NaN"):
        load_checkpoint(ours(), saved(model, tmp_path / "c.pth"))


class Payload:
    def __reduce__(self):
        return (print, ("this must not run",))


@pytest.mark.parametrize(
    "content, says",
    [
        ("pickle", "c.pth is not a checkpoint that can be read safely: .*builtins.print"),
        ("cut", "c.pth is not a checkpoint that can be read safely"),
        ("text", "c.pth is not a checkpoint that can be read safely"),
        ("empty", "c.pth is not a checkpoint that can be read safely: EOFError"),
        ("missing", "no checkpoint file at .*c.pth"),
        ("no tensors", "c.pth holds no tensors"),
        ("half released", "released HGRN checkpoint lacks 'layers.1.token_mixer.gate.weight'"),
    ],
)
def test_files_that_are_no_checkpoints(content, says, tmp_path, capsys):
    path = tmp_path / "c.pth"
    if content == "pickle":
        torch.save({"model": Payload()}, path)
    elif content == "cut":
        data = saved(ours(), path).read_bytes()
        path.write_bytes(data[: len(data) // 2])
    elif content == "text":
        path.write_text("not a checkpoint")
    elif content == "empty":
        path.write_bytes(b"")
    elif content == "no tensors":
        torch.save({"epoch": 3}, path)
    elif content == "half released":
        state = released_state_dict()
        del state["layers.1.token_mixer.gate.weight"]
        torch.save(state, path)
    with pytest.raises(FileNotFoundError if content == "missing" else ValueError, match=says) as error:
        load_checkpoint(ours(), path)
    assert "\n" not in str(error.value)
    assert "must not run" not in capsys.readouterr().out


def test_how_many_more_tensors_do_not_fit(tmp_path):
    path = saved(ours(), tmp_path / "c.pth")
    own, file = ours(depth=1).state_dict(), ours().state_dict()
    # all tensors of two blocks, and the lower bound; three are named
    with pytest.raises(ValueError, match=f" and {len(file) - len(own) + 1 - 3} more"):
        load_checkpoint(ours(depth=1), path)


def test_weights_of_five_channels_keep_their_projection():
    model = ours(in_chans=5)
    assert checkpoint_filter_fn(model.state_dict(), model) and model.pretrained_cfg["first_conv"] is None
    colour = ours()
    assert checkpoint_filter_fn(colour.state_dict(), colour) and colour.pretrained_cfg["first_conv"]
