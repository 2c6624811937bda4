"""What timm expects of a model, for every registered model or a small one of the same class."""

import copy
import itertools
import math
import pickle

import pytest
import timm
import torch
from timm.layers import DropPath
from timm.models import create_feature_extractor
from timm.optim import param_groups_layer_decay, param_groups_weight_decay
from torch import nn

import hgrn_vision
from hgrn_vision import HgrnDeit
from hgrn_vision.layers import RmsNorm

MODELS = timm.list_models(module="hgrn")
PARAMETERS = {  # the paper's table 7 prints 6.1M and 23.7M
    "hgrn_deit_tiny": 6_107_560,
    "hgrn_deit_small": 23_715_688,
    "hgrn_deit_base": 93_436_648,
    "hgrn_deit_tiny_patch16_224": 6_142_120,
    "hgrn_deit_small_patch16_224": 23_784_808,
    "hgrn_deit_base_patch16_224": 93_574_888,
    "hgrn2d_deit_tiny": 6_107_560,
    "hgrn2d_deit_small": 23_715_688,
    "hgrn2d_deit_tiny_patch16_224": 6_142_120,
    "hgrn2d_deit_small_patch16_224": 23_784_808,
    "hgrn1d_vit_tiny": 6_107_560,
    "hgrn1d_vit_small": 23_715_688,
}
ABLATIONS = [
    dict(input_gate=False),
    dict(output_gate=False),
    dict(gate_after_norm=True),
    dict(forget_gate="bound_only"),
    dict(forget_gate="none"),
    dict(lower_bound="none"),
    dict(lower_bound="independent"),
    dict(lower_bound="decreasing"),
    dict(complex_state=False),
    dict(data_dependent_theta=True),
    dict(bidirectional=False),
    dict(scan="2d"),
    dict(scan="2d", gate_after_norm=True),
    dict(scan="2d", data_dependent_theta=True),
]
GRID = dict(scan="2d", local_conv=3)
LOCAL = [dict(local_conv=3), dict(local_conv=5, scan="2d"), dict(local_conv=3, input_gate=False)]


SMALL = dict(img_size=32, patch_size=8, embed_dim=24, depth=3, num_classes=10)


def small(name="hgrn_deit_tiny", **kwargs):
    return timm.create_model(name, **{**SMALL, **kwargs})


def images(size=32, batch=2, channels=3):
    height, width = size if isinstance(size, tuple) else (size, size)
    return torch.randn(batch, channels, height, width)


def test_registry():
    assert len(MODELS) == 12 and set(PARAMETERS) == set(MODELS)
    for name in MODELS:
        cfg = timm.get_pretrained_cfg(name)
        assert cfg is not None and cfg.architecture == name
        assert cfg.crop_pct == (0.875 if name.startswith("hgrn1d") else 0.9)
        assert (cfg.interpolation, cfg.fixed_input_size) == ("bicubic", False)
        assert (cfg.first_conv, cfg.classifier) == ("patch_embed.proj", "head")
        assert (cfg.mean, cfg.std) == ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
        assert (cfg.license, cfg.paper_ids) == ("apache-2.0", "arXiv:2311.04823")


@pytest.mark.parametrize("name", MODELS)
def test_sizes_and_names(name):
    model = timm.create_model(name, device="meta")
    assert sum(p.numel() for p in model.parameters()) == PARAMETERS[name]
    D = model.embed_dim
    state = {key: tuple(tensor.shape) for key, tensor in model.state_dict().items()}
    patch = 16 if "patch16" in name else 14
    expected = {"lower_bound": (12, D), "patch_embed.proj.weight": (D, 3, patch, patch), "patch_embed.proj.bias": (D,)}
    expected |= {"head.weight": (1000, D), "head.bias": (1000,)}
    for i in range(12):
        block = f"blocks.{i}."
        expected[block + "mixer.theta"] = (2, D)
        for layer, rows, columns in [
            ("mixer.in_proj", 5 * D, D),
            ("mixer.out_proj", D, 2 * D),
            ("mlp.fc1", 4 * D, D),
            ("mlp.fc2", D, 2 * D),
        ]:
            expected |= {f"{block}{layer}.weight": (rows, columns), f"{block}{layer}.bias": (rows,)}
        for norm, width in [("norm1", D), ("norm2", D), ("mixer.norm", 2 * D)]:
            expected |= {f"{block}{norm}.weight": (width,), f"{block}{norm}.bias": (width,)}
    assert state == expected


@pytest.mark.parametrize(
    "name", ["hgrn_deit_tiny", "hgrn_deit_small_patch16_224", "hgrn1d_vit_tiny", "hgrn2d_deit_tiny"]
)
def test_forward_at_the_default_size(name):
    model = timm.create_model(name).eval()
    with torch.no_grad():
        out = model(images(224, batch=1))
    assert out.shape == (1, 1000) and torch.isfinite(out).all()


@pytest.mark.parametrize("options", [{}, *ABLATIONS, *LOCAL], ids=str)
@pytest.mark.parametrize("size", [16, 32, 48])
def test_backward_reaches_every_parameter(size, options):
    model = small(**options)
    out = model(images(size))
    assert out.shape == (2, 10) and torch.isfinite(out).all()
    out.square().mean().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and torch.isfinite(parameter.grad).all(), name
        assert parameter.grad.any(), name


@pytest.mark.parametrize("options", ABLATIONS, ids=str)
def test_ablations_change_the_output(options):
    full, ablated = small().eval(), small(**options).eval()
    own = ablated.state_dict()
    shared = {k: v for k, v in full.state_dict().items() if k in own and own[k].shape == v.shape and "theta" not in k}
    ablated.load_state_dict(shared, strict=False)
    x = images()
    assert (full(x) - ablated(x)).abs().max() > 1e-5


@pytest.mark.parametrize("name", ["hgrn_deit_tiny", "hgrn2d_deit_tiny"])
@pytest.mark.parametrize("local_conv", [3, 5])
def test_a_new_local_convolution_changes_nothing(name, local_conv, tmp_path):
    plain, model = small(name).eval(), small(name, local_conv=local_conv).eval()
    torch.save(plain.state_dict(), tmp_path / "plain.pth")
    hgrn_vision.load_checkpoint(model, tmp_path / "plain.pth")
    x = images(40)
    torch.testing.assert_close(model(x), plain(x), rtol=1e-5, atol=1e-6)
    source = dict(file=str(tmp_path / "plain.pth"), num_classes=10)
    loaded = small(name, local_conv=local_conv, pretrained=True, pretrained_cfg_overlay=source).eval()
    torch.testing.assert_close(loaded(x), plain(x), rtol=1e-5, atol=1e-6)
    nn.init.normal_(model.blocks[0].mixer.local_conv.weight)
    torch.save(model.state_dict(), tmp_path / "local.pth")
    hgrn_vision.load_checkpoint(loaded, tmp_path / "local.pth")
    assert torch.equal(loaded(x), model(x)) and (model(x) - plain(x)).abs().max() > 1e-3


def test_weights_of_one_dimension_load_in_two():
    line, grid = small().eval(), small("hgrn2d_deit_tiny").eval()
    assert {k: v.shape for k, v in line.state_dict().items()} == {k: v.shape for k, v in grid.state_dict().items()}
    grid.load_state_dict(line.state_dict())
    x = images()
    assert (grid(x) - line(x)).abs().max() > 1e-4
    back = small("hgrn2d_deit_tiny", scan="1d").eval()
    back.load_state_dict(grid.state_dict())
    assert torch.equal(back(x), line(x))


def test_images_of_a_batch_do_not_mix():
    model = small("hgrn2d_deit_tiny", local_conv=5).eval()
    for block in model.blocks:
        nn.init.normal_(block.mixer.local_conv.weight)
    x = images((24, 40), batch=3)
    want = torch.cat([model(image[None]) for image in x])
    torch.testing.assert_close(model(x), want, rtol=1e-5, atol=1e-5)


def test_transposing_the_image_transposes_the_map_of_a_grid_scan():
    """Rows and columns are scanned alike, so a transposed image gives the transposed map."""
    model = small("hgrn2d_deit_tiny", patch_size=1).double().eval()
    x = images((5, 7), batch=1).double()
    (whole,), (turned,) = (model.forward_intermediates(y, 1, intermediates_only=True) for y in (x, x.transpose(2, 3)))
    torch.testing.assert_close(turned.transpose(2, 3), whole, rtol=0, atol=1e-10)


def test_ablations_have_no_unused_parameters():
    assert small(lower_bound="none").lower_bound is None
    assert small(forget_gate="none").lower_bound is None
    assert small(forget_gate="none").blocks[0].mixer.in_proj.out_features == 4 * 24
    assert small(output_gate=False).blocks[0].mixer.in_proj.out_features == 3 * 24
    assert small(data_dependent_theta=True).blocks[0].mixer.theta is None


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(global_pool="token"), "global_pool must be one of '', 'avg', 'max', 'avgmax', got 'token'"),
        (dict(global_pool="map"), "got 'map'"),
        (dict(forget_gate="half"), "forget_gate must be one of"),
        (dict(scan="3d"), "scan must be one of '1d', '2d', got '3d'"),
        (dict(local_conv=4), "local_conv must be one of 0, 3, 5, got 4"),
        (dict(local_conv=4, scan="2d", input_gate=False), "local_conv must be one of 0, 3, 5, got 4"),
        (dict(lower_bound="random"), "lower_bound must be one of"),
        (dict(forget_gate="bound_only", lower_bound="none"), "needs a lower_bound"),
        (dict(gate_after_norm=True, output_gate=False), "needs output_gate"),
        (dict(data_dependent_theta=True, complex_state=False), "needs complex_state"),
    ],
)
def test_impossible_options(options, message):
    with pytest.raises(ValueError, match=message):
        small(**options)


def test_unknown_argument():
    with pytest.raises(TypeError, match="num_heads"):
        small(num_heads=3)


def test_pretrained_without_weights_is_timms_own_error():
    with pytest.raises(RuntimeError, match="[Nn]o pretrained weights"):
        timm.create_model("hgrn_deit_small", pretrained=True)


@pytest.mark.parametrize("pool", ["", "avg", "max", "avgmax"])
def test_pooling_norm_and_head(pool):
    model = small(global_pool=pool).eval()
    tokens = model.forward_features(images())
    assert tokens.shape == (2, 16, 24)
    mean, largest = tokens.mean(1), tokens.amax(1)
    pooled = {"": tokens, "avg": mean, "max": largest, "avgmax": 0.5 * (mean + largest)}[pool]
    pre_logits = model.forward_head(tokens, pre_logits=True)
    torch.testing.assert_close(pre_logits, RmsNorm()(pooled))
    torch.testing.assert_close(model.forward_head(tokens), model.head(pre_logits))


def test_dropout_and_drop_path_act():
    x = images()
    for option in ("drop_rate", "proj_drop_rate", "drop_path_rate"):
        model = small(**{option: 0.5})
        assert not torch.equal(model(x), model(x)), option
        model.eval()
        assert torch.equal(model(x), model(x)), option
    rates = [m.drop_prob for m in small(depth=5, drop_path_rate=0.4).modules() if isinstance(m, DropPath)]
    assert rates == pytest.approx([0.1, 0.2, 0.3, 0.4])


def test_a_dropped_path_leaves_the_residual_alone():
    block = small(drop_path_rate=0.5).blocks[-1]
    x = torch.randn(64, 4, 24)
    out = block(x, torch.zeros(24))
    untouched = (out == x).all(dim=(1, 2)).float().mean()
    assert 0.05 < untouched < 0.6  # a quarter of the samples lose both branches


def test_mlp_ratio_norm_layer_and_act_layer():
    class MyNorm(nn.LayerNorm):
        pass

    model = small(mlp_ratio=3.0, norm_layer=MyNorm, act_layer=nn.GELU)
    assert model.blocks[0].mlp.fc1.out_features == 2 * 72
    assert isinstance(model.blocks[0].mlp.act, nn.GELU)
    norms = [m for m in model.modules() if isinstance(m, nn.LayerNorm)]
    assert len(norms) == 9 and all(type(m) is MyNorm for m in norms)
    assert {m.eps for m in small().modules() if isinstance(m, nn.LayerNorm)} == {1e-5}


def test_device_and_dtype_reach_every_submodule():
    meta = small(device="meta")
    assert all(t.is_meta for t in [*meta.parameters(), *meta.buffers()])
    meta.to_empty(device="cpu").init_weights()
    assert torch.isfinite(meta(images())).all()
    torch.testing.assert_close(meta.lower_bound, torch.ones(3, 24))
    torch.testing.assert_close(meta.blocks[1].mixer.theta, small().blocks[1].mixer.theta)
    half = small(dtype=torch.bfloat16).eval()
    assert all(p.dtype == torch.bfloat16 for p in half.parameters())
    out = half(images().bfloat16())
    assert out.dtype == torch.bfloat16 and torch.isfinite(out).all()


def test_forward_intermediates():
    model = small().eval()
    x = images((24, 40))
    final, every = model.forward_intermediates(x)
    assert [tuple(y.shape) for y in every] == [(2, 24, 3, 5)] * 3
    torch.testing.assert_close(final, model.forward_features(x))
    torch.testing.assert_close(every[-1].flatten(2).transpose(1, 2), final)
    last = model.forward_intermediates(x, indices=1, output_fmt="NLC", intermediates_only=True)
    torch.testing.assert_close(last, [final])
    picked = model.forward_intermediates(x, indices=[0, 2], norm=True, output_fmt="NLC", intermediates_only=True)
    torch.testing.assert_close(picked[1], model.norm(final))
    early, first = model.forward_intermediates(x, indices=[0], stop_early=True)
    torch.testing.assert_close(first[0], every[0])
    torch.testing.assert_close(early, every[0].flatten(2).transpose(1, 2))
    as_dict = model.forward_intermediates(x, output_dict=True)
    torch.testing.assert_close(as_dict, {"image_intermediates": every, "image_features": final})
    assert set(model.forward_intermediates(x, output_dict=True, intermediates_only=True)) == {"image_intermediates"}
    with pytest.raises(ValueError, match="output_fmt"):
        model.forward_intermediates(x, output_fmt="NHWC")


@pytest.mark.parametrize("options", [{}, GRID], ids=str)
def test_features_only(options):
    model = small(**options).eval()
    features = small(features_only=True, out_indices=(0, 1), **options).eval()
    features.model.load_state_dict(model.state_dict(), strict=False)
    assert len(features.model.blocks) == 2 and features.model.lower_bound.shape == (3, 24)
    assert features.feature_info.channels() == [24, 24] and features.feature_info.reduction() == [8, 8]
    x = images()
    # the lower bounds of the blocks that stay are those of the whole network
    torch.testing.assert_close(features(x), model.forward_intermediates(x, indices=[0, 1])[1])
    assert len(timm.create_model("hgrn_deit_tiny", features_only=True, device="meta").feature_info.channels()) == 3
    assert len(model.feature_info) == 3


def test_prune_intermediate_layers():
    model = small().eval()
    x = images()
    want = model.forward_intermediates(x, indices=[1], intermediates_only=True)
    assert model.prune_intermediate_layers([1]) == [1]
    torch.testing.assert_close(model.forward_intermediates(x, indices=[1], intermediates_only=True), want)
    assert isinstance(model.head, nn.Identity) and model.global_pool == ""


def test_classifier():
    model = small()
    assert model.get_classifier() is model.head
    model.reset_classifier(7, "max")
    assert (model.num_classes, model.global_pool) == (7, "max") and model(images()).shape == (2, 7)
    model.reset_classifier(0)
    assert model(images()).shape == (2, 24)
    with pytest.raises(ValueError, match="global_pool"):
        model.reset_classifier(3, "token")
    headless = small(num_classes=0)
    assert headless(images()).shape == (2, 24)
    assert headless.num_features == headless.head_hidden_size == headless.embed_dim == 24
    assert headless.num_prefix_tokens == 0


@pytest.mark.parametrize("options", [{}, GRID], ids=str)
def test_grad_checkpointing_gives_the_same_gradients(options):
    model = small(drop_path_rate=0.2, **options)
    x = images()

    def gradients():
        torch.manual_seed(1)
        model.zero_grad()
        out = model(x)
        out.sum().backward()
        return [out.detach()] + [p.grad.clone() for p in model.parameters()]

    passes = []
    for block in model.blocks:
        block.register_forward_pre_hook(lambda block, _: passes.append(block))
    plain = gradients()
    assert passes == list(model.blocks)
    passes.clear()
    model.set_grad_checkpointing()
    assert all(itertools.starmap(torch.equal, zip(plain, gradients(), strict=True)))
    # backward recomputes each block
    assert len(passes) == 6 and set(passes) == set(model.blocks)
    passes.clear()
    model.set_grad_checkpointing(False)
    gradients()
    assert len(passes) == 3


@pytest.mark.parametrize("options", [{}, GRID], ids=str)
def test_layer_decay_and_weight_decay_groups(options):
    model = small(**options)
    assert model.no_weight_decay() == {"lower_bound", *(f"blocks.{i}.mixer.theta" for i in range(3))}
    groups = param_groups_layer_decay(model, weight_decay=0.1, layer_decay=0.5)
    scale = {id(p): g["lr_scale"] for g in groups for p in g["params"]}
    named = dict(model.named_parameters())
    assert len(scale) == len(named)
    assert scale[id(named["lower_bound"])] == scale[id(named["patch_embed.proj.weight"])] == min(scale.values())
    assert scale[id(named["head.weight"])] == max(scale.values()) > scale[id(named["blocks.2.mlp.fc1.weight"])]
    undecayed = param_groups_weight_decay(model, 0.1, no_weight_decay_list=model.no_weight_decay())[0]
    assert undecayed["weight_decay"] == 0
    ids = {id(p) for p in undecayed["params"]}
    assert id(named["lower_bound"]) in ids and id(named["blocks.1.mixer.theta"]) in ids


def test_set_input_size():
    model = small().eval()
    model.set_input_size(img_size=48, patch_size=16)
    assert model.patch_embed.img_size == (48, 48) and model.patch_embed.grid_size == (3, 3)
    assert model.feature_info[0]["reduction"] == 16
    assert model.forward_features(images(48)).shape == (2, 9, 24)


@pytest.mark.parametrize("size", [224, 448, 1024, (160, 320)])
def test_any_multiple_of_the_patch(size):
    model = small(img_size=224, patch_size=32, depth=2).eval()
    with torch.no_grad():
        assert torch.isfinite(model(images(size, batch=1))).all()


@pytest.mark.parametrize("options", [{}, GRID], ids=str)
@pytest.mark.parametrize("size", [(97, 131), (96, 131), (97, 128), (5, 3)])
def test_any_other_size_is_padded_with_zeros_below_and_to_the_right(size, options):
    model = small(**options).eval()
    x = images(size)
    rows, columns = (math.ceil(side / 8) for side in size)
    padded = torch.zeros(2, 3, 8 * rows, 8 * columns)
    padded[:, :, : size[0], : size[1]] = x
    tokens = model.forward_features(x)
    assert tokens.shape == (2, rows * columns, 24)
    # partly padded patches are tokens like any other: in the scans, in the mean and in the maps
    assert torch.equal(tokens, model.forward_features(padded))
    torch.testing.assert_close(model.forward_head(tokens, pre_logits=True), RmsNorm()(tokens.mean(1)))
    assert torch.equal(model(x), model(padded))
    (last,) = model.forward_intermediates(x, indices=1, intermediates_only=True)
    assert torch.equal(last, tokens.unflatten(1, (rows, columns)).permute(0, 3, 1, 2))
    features = small(features_only=True, out_indices=(0, 2), **options).eval()
    assert [tuple(y.shape) for y in features(x)] == [(2, 24, rows, columns)] * 2
    assert all(gate.shape == tokens.shape for gate in model.forget_gates(x))
    traced = create_feature_extractor(model, ["head"])
    assert torch.equal(traced(x)["head"], model(x))
    scripted = torch.jit.script(small(scriptable=True, **options).eval())
    assert scripted(x).shape == (2, 10)


def test_images_of_whole_patches_are_not_copied():
    model = small()
    seen = []
    model.patch_embed.proj.register_forward_pre_hook(lambda layer, args: seen.append(args[0]))
    x = images()
    model(x)
    assert seen[0] is x


@pytest.mark.parametrize(
    "x, options, message",
    [
        (images((97, 32)), dict(dynamic_img_pad=False), "97x32 pixels is not a multiple of the patch 8x8"),
        (images(40), dict(dynamic_img_size=False), "40x40 pixels does not match the model's 32x32"),
        (images(channels=1), {}, "3 channels, got 1"),
        (images()[0], {}, "3 dimensions"),
        (images((0, 8)), {}, "0x8 pixels has no tokens"),
    ],
)
def test_bad_images(x, options, message):
    with pytest.raises(ValueError, match=message) as error:
        small(**options)(x)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("options", [{}, *ABLATIONS, *LOCAL], ids=str)
def test_torchscript(options):
    model = small(scriptable=True, **options).eval()
    x = images()
    scripted = torch.jit.script(model)
    torch.testing.assert_close(scripted(x), model(x), rtol=1e-5, atol=1e-6)
    # not specialised on the number of tokens
    torch.testing.assert_close(scripted(images(56)).shape, model(images(56)).shape)


@pytest.mark.parametrize("options", [{}, *ABLATIONS, *LOCAL], ids=str)
def test_fx_tracing_is_bit_equal_and_scripts(options):
    # a width that the kernel for whole blocks supports
    model = small(**options, embed_dim=32).eval()
    traced = create_feature_extractor(model, ["head", "blocks.1"])
    x = images()
    assert torch.equal(traced(x)["head"], model(x))
    with torch.inference_mode():
        got = traced(x)
        assert torch.equal(got["head"], model(x))
        (want,) = model.forward_intermediates(x, indices=[1], output_fmt="NLC", intermediates_only=True)
        assert torch.equal(got["blocks.1"], want)
    torch.testing.assert_close(torch.jit.script(traced)(x)["head"], model(x), rtol=1e-4, atol=1e-5)


def test_fx_traced_backward():
    model = small()
    traced = create_feature_extractor(model, ["head"])
    traced(images())["head"].sum().backward()
    assert all(p.grad is not None for p in traced.parameters())


@pytest.mark.parametrize(
    "options",
    [{}, dict(gate_after_norm=True), dict(input_gate=False), GRID],
    ids=str,
)
def test_compile_fullgraph(options):
    model = small(**options)
    x = images()
    model(x).sum().backward()
    want = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    out = compiled(x)
    out.sum().backward()
    torch.testing.assert_close(out, model(x), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close([p.grad for p in model.parameters()], want, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("exportable", [False, True])
def test_export_with_dynamic_batch(exportable):
    model = small(exportable=exportable).eval()
    program = torch.export.export(model, (images(),), dynamic_shapes=({0: torch.export.Dim("batch", max=64)},))
    x = images(batch=5)
    torch.testing.assert_close(program.module()(x), model(x), rtol=1e-4, atol=1e-5)
    called = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
    if exportable:
        assert not any("hgrn" in target for target in called)


@pytest.mark.parametrize("options", [{}, GRID], ids=str)
def test_export_with_dynamic_size(options):
    model = small(exportable=True, **options).eval()
    batch, rows, columns = (torch.export.Dim(n, min=2, max=40) for n in ("batch", "rows", "columns"))
    shapes = ({0: batch, 2: 8 * rows, 3: 8 * columns},)
    program = torch.export.export(model, (images((40, 56), batch=3),), dynamic_shapes=shapes)
    for size in (16, 72, (160, 24)):
        x = images(size)
        torch.testing.assert_close(program.module()(x), model(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("options", [{}, GRID], ids=str)
def test_autocast(options):
    model = small(**options)
    x = images()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = model(x)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), model(x), rtol=0.1, atol=0.1)
    out.float().sum().backward()
    assert all(torch.isfinite(p.grad).all() and p.grad.dtype == torch.float32 for p in model.parameters())


def test_channels_last_deepcopy_and_pickle():
    model = small().eval()
    x = images()
    want = model(x)
    twin = copy.deepcopy(model)
    assert torch.equal(twin(x), want)
    assert torch.equal(pickle.loads(pickle.dumps(model))(x), want)
    last = twin.to(memory_format=torch.channels_last)(x.contiguous(memory_format=torch.channels_last))
    torch.testing.assert_close(last, want, rtol=1e-4, atol=1e-5)


def test_hooks_see_the_projections():
    seen = []
    model = small().eval()
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            module.register_forward_hook(lambda *_, name=name: seen.append(name))
    model(images())
    assert sorted(seen) == sorted(name for name, m in model.named_modules() if isinstance(m, nn.Linear))


@pytest.mark.parametrize("channels", [1, 4])
def test_weights_of_three_channels_adapted(channels, tmp_path):
    timm.models.save_for_hf(small(), tmp_path, model_args=SMALL, safe_serialization=True)
    model = timm.create_model(f"local-dir:{tmp_path}", pretrained=True, in_chans=channels).eval()
    assert model(images(channels=channels)).shape == (2, 10)
    trained = small()
    hgrn_vision.load_checkpoint(trained, tmp_path / "model.safetensors")
    want = trained.patch_embed.proj.weight
    got = model.patch_embed.proj.weight
    expected = want.sum(1, keepdim=True) if channels == 1 else want.repeat(1, 2, 1, 1)[:, :4] * 3 / 4
    torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("options", [{}, dict(in_chans=4), dict(forget_gate="none", embed_dim=16)], ids=str)
def test_saved_for_the_hub_and_loaded_from_a_folder(options, tmp_path):
    model = small(**options).eval()
    names = [f"class {i}" for i in range(10)]
    timm.models.save_for_hf(
        model, tmp_path, model_config={"label_names": names}, model_args={**SMALL, **options}, safe_serialization=True
    )
    loaded = timm.create_model(f"local-dir:{tmp_path}", pretrained=True).eval()
    x = images(channels=model.in_chans)
    assert torch.equal(loaded(x), model(x))
    assert loaded.pretrained_cfg["label_names"] == names
    assert isinstance(loaded, HgrnDeit)
