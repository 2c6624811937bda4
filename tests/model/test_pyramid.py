"""The feature pyramid as a timm model, and with decoders and detectors from other libraries."""

import copy
import logging
import math
import pickle
from pathlib import Path

import pytest
import timm
import torch
from timm.optim import param_groups_layer_decay
from torch import nn

import hgrn_vision
from hgrn_vision import HgrnPyramid

MODELS = ["hgrn_pyramid_tiny", "hgrn_pyramid_small"]
SMALL = dict(img_size=64, embed_dim=32, depth=2, num_classes=10)


def small(name="hgrn_pyramid_tiny", **kwargs):
    return timm.create_model(name, **{**SMALL, **kwargs})


def images(size=64, batch=2, channels=3):
    height, width = size if isinstance(size, tuple) else (size, size)
    return torch.randn(batch, channels, height, width)


@pytest.mark.parametrize("name, parameters, channels", [(MODELS[0], 7_163_032, 192), (MODELS[1], 27_863_368, 384)])
def test_registered(name, parameters, channels):
    assert sorted(MODELS) == timm.list_models(module="pyramid")
    assert timm.get_pretrained_cfg(name).first_conv == "patch_embed.proj"
    model = timm.create_model(name, device="meta")
    assert sum(p.numel() for p in model.parameters()) == parameters
    features = timm.create_model(name, features_only=True, device="meta")
    assert features.feature_info.reduction() == [4, 8, 16, 32]
    assert features.feature_info.channels() == [channels // 4, channels // 2, channels, channels]


def test_maps_at_the_default_size():
    features = timm.create_model("hgrn_pyramid_tiny", features_only=True).eval()
    with torch.no_grad():
        maps = features(images(224, batch=1))
    assert [tuple(y.shape) for y in maps] == [(1, 48, 56, 56), (1, 96, 28, 28), (1, 192, 14, 14), (1, 192, 7, 7)]
    assert all(torch.isfinite(y).all() for y in maps)


def test_each_map_is_computed_as_vitdet_does():
    model = small().eval()
    tokens, maps = model.forward_intermediates(images(64))
    grid = tokens.unflatten(1, (4, 4)).permute(0, 3, 1, 2)
    levels = model.pyramid
    resampled = [
        levels["0"].resample[3](nn.GELU()(levels["0"].resample[1](levels["0"].resample[0](grid)))),
        levels["1"].resample(grid),
        grid,
        nn.functional.max_pool2d(grid, 2),
    ]
    for i, x in enumerate(resampled):
        level = levels[str(i)]
        for conv, norm in ((level.proj, level.norm1), (level.conv, level.norm2)):
            x = nn.functional.conv2d(x, conv.weight, padding=conv.padding)
            x = nn.functional.layer_norm(x.movedim(1, -1), x.shape[1:2], norm.weight, norm.bias, 1e-6).movedim(-1, 1)
        torch.testing.assert_close(maps[i], x)


@pytest.mark.parametrize("size", [(97, 131), (96, 131), (48, 80), (5, 3)])
def test_maps_cover_the_image_and_no_more(size):
    features = small(features_only=True).eval()
    x = images(size)
    padded = torch.zeros(2, 3, *(16 * math.ceil(side / 16) for side in size))
    padded[:, :, : size[0], : size[1]] = x
    maps = features(x)
    for y, whole, stride in zip(maps, features(padded), (4, 8, 16, 32), strict=True):
        rows, columns = (math.ceil(side / stride) for side in size)
        assert y.shape[2:] == (rows, columns)
        assert torch.equal(y, whole[..., :rows, :columns])


def test_images_that_cannot_be_padded_are_refused():
    with pytest.raises(ValueError, match="97x64 pixels is not a multiple of the patch 16x16"):
        small(features_only=True, dynamic_img_pad=False)(images((97, 64)))


@pytest.mark.parametrize("chosen, kept", [((1, 3), [1, 3]), ((-1,), [3]), (2, [2, 3]), ((0, 1, 2), [0, 1, 2])])
def test_out_indices_choose_maps(chosen, kept):
    model = small().eval()
    features = small(features_only=True, out_indices=chosen).eval()
    missing = features.model.load_state_dict(model.state_dict(), strict=False).missing_keys
    assert not missing
    assert features.feature_info.reduction() == [(4, 8, 16, 32)[i] for i in kept]
    assert features.feature_info.channels() == [(8, 16, 32, 32)[i] for i in kept]
    x = images()
    every = model.forward_intermediates(x, intermediates_only=True)
    torch.testing.assert_close(features(x), [every[i] for i in kept])
    # every parameter has a gradient: DistributedDataParallel would wait for a missing one
    sum(y.square().mean() for y in features(x)).backward()
    assert not [name for name, p in features.named_parameters() if p.grad is None]


def test_forward_intermediates():
    model = small().eval()
    # maps of a new model have unit variance, which the final norm leaves alone
    nn.init.normal_(model.pyramid["3"].norm2.weight)
    x = images((50, 70))
    final, every = model.forward_intermediates(x)
    torch.testing.assert_close(final, model.forward_features(x))
    tokens = model.forward_intermediates(x, indices=[0, -1], output_fmt="NLC", intermediates_only=True)
    torch.testing.assert_close(tokens, [every[i].flatten(2).transpose(1, 2) for i in (0, 3)])
    (normed,) = model.forward_intermediates(x, indices=1, norm=True, intermediates_only=True)
    torch.testing.assert_close(normed, model.norm(every[3].movedim(1, -1)).movedim(-1, 1))
    torch.testing.assert_close(
        model.forward_intermediates(x, output_dict=True), {"image_intermediates": every, "image_features": final}
    )
    with pytest.raises(ValueError, match="output_fmt"):
        model.forward_intermediates(x, output_fmt="NHWC")


def test_pruning_drops_what_is_not_asked_for():
    model = small()
    assert model.prune_intermediate_layers([0, 2], prune_head=False) == [0, 2]
    assert list(model.pyramid) == ["0", "2"] and not isinstance(model.norm, nn.Identity) and model.num_classes == 10
    assert model.prune_intermediate_layers([2], prune_norm=True) == [2]
    assert list(model.pyramid) == ["2"] and isinstance(model.norm, nn.Identity) and model.num_classes == 0


@pytest.mark.parametrize("stride, reductions", [(32, [4, 8, 16, 32]), (16, [4, 8, 16, 16]), (8, [4, 8, 8, 8])])
def test_output_stride(stride, reductions):
    features = small(features_only=True, output_stride=stride)
    assert features.feature_info.reduction() == reductions
    assert [64 // y.shape[-1] for y in features(images())] == reductions


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(patch_size=14), "multiple of 4, got 14x14"),
        (dict(patch_size=(16, 8)), "must be square with a side that is a multiple of 4, got 16x8"),
        (dict(embed_dim=30), "embed_dim must be a multiple of 4, got 30"),
        (dict(output_stride=12), "output_stride must be one of 4, 8, 16, 32, got 12"),
    ],
)
def test_impossible_options(options, message):
    with pytest.raises(ValueError, match=message):
        small(**options)


def test_set_input_size():
    model = small().eval()
    model.set_input_size(img_size=64, patch_size=8)
    assert [info["reduction"] for info in model.feature_info] == [2, 4, 8, 16]
    assert [y.shape[-1] for y in model.forward_intermediates(images(), intermediates_only=True)] == [32, 16, 8, 4]


@pytest.mark.parametrize("patch, reductions", [(8, [2, 4, 8, 8]), (32, [8, 16, 32, 32])])
def test_another_patch_size_scales_every_stride(patch, reductions):
    model = small(output_stride=16).eval()
    model.set_input_size(patch_size=patch)
    assert [info["reduction"] for info in model.feature_info] == reductions
    maps = model.forward_intermediates(images(), intermediates_only=True)
    assert [64 // y.shape[-1] for y in maps] == reductions
    # nothing was cropped: the coarsest map is the last block's tokens, in their own number
    assert maps[3].shape[-1] == 64 // patch


def test_an_impossible_patch_size_changes_nothing():
    model = small().eval()
    for patch in (6, (16, 8)):
        with pytest.raises(ValueError, match="the patch must be square"):
            model.set_input_size(patch_size=patch)
    assert model.patch_embed.patch_size == (16, 16)
    assert [info["reduction"] for info in model.feature_info] == [4, 8, 16, 32]


def test_classifies_exactly_as_the_plain_model():
    plain = timm.create_model("hgrn_deit_tiny_patch16_224", **SMALL).eval()
    model = small().eval()
    pyramid = {name: tensor.clone() for name, tensor in model.pyramid.state_dict().items()}
    model.load_state_dict(plain.state_dict())
    x = images((50, 70))
    assert torch.equal(model(x), plain(x))
    assert torch.equal(model.forward_features(x), plain.forward_features(x))
    assert all(torch.equal(tensor, pyramid[name]) for name, tensor in model.pyramid.state_dict().items())


def test_weights_of_the_plain_model_load_by_every_way(tmp_path, caplog):
    plain = timm.create_model("hgrn_deit_tiny_patch16_224", **SMALL).eval()
    path = tmp_path / "plain.pth"
    torch.save(plain.state_dict(), path)
    x = images()

    def load(model, how):
        caplog.clear()
        with caplog.at_level(logging.INFO, "hgrn_vision"):
            model = how(model)
        (line,) = [record.getMessage() for record in caplog.records if record.name.startswith("hgrn_vision")]
        assert line == (
            "the weights have no pyramid: its 32 tensors keep their initial values "
            "(pyramid.0.*, pyramid.1.*, pyramid.2.*, pyramid.3.*)"
        )
        return model

    model = small()
    new = load(model, lambda m: hgrn_vision.load_checkpoint(m, path))
    assert new == [name for name in model.state_dict() if name.startswith("pyramid.")] and len(new) == 32
    assert torch.equal(model.eval()(x), plain(x))
    model = load(None, lambda _: small(checkpoint_path=path))
    assert torch.equal(model.eval()(x), plain(x))
    model = load(None, lambda _: small(pretrained=True, pretrained_cfg_overlay=dict(file=str(path), num_classes=10)))
    assert torch.equal(model.eval()(x), plain(x))
    # as segmentation_models_pytorch calls it
    overlay = dict(file=str(path), num_classes=10)
    features = load(None, lambda _: small(features_only=True, pretrained=True, pretrained_cfg_overlay=overlay))
    assert torch.equal(features.model.blocks[1].mlp.fc2.weight, plain.blocks[1].mlp.fc2.weight)


def test_its_own_weights_load_without_a_word_and_strictly(tmp_path, caplog):
    model = small().eval()
    timm.models.save_for_hf(model, tmp_path, model_args=SMALL, safe_serialization=True)
    with caplog.at_level(logging.INFO, "hgrn_vision"):
        loaded = timm.create_model(f"local-dir:{tmp_path}", pretrained=True).eval()
        assert hgrn_vision.load_checkpoint(small(), tmp_path / "model.safetensors") == []
    assert not caplog.records and isinstance(loaded, HgrnPyramid)
    x = images()
    torch.testing.assert_close(loaded.forward_intermediates(x), model.forward_intermediates(x), rtol=0, atol=0)
    state = model.state_dict()
    del state["pyramid.2.conv.weight"]
    with pytest.raises(RuntimeError, match="pyramid.2.conv.weight"):
        small().load_state_dict(state)
    torch.save(state, tmp_path / "torn.pth")
    with pytest.raises(ValueError, match="pyramid.2.conv.weight is missing"):
        hgrn_vision.load_checkpoint(small(), tmp_path / "torn.pth")


def test_weights_of_another_patch_size_and_head(tmp_path):
    plain = timm.create_model("hgrn_deit_tiny", **{**SMALL, "num_classes": 3})
    torch.save(plain.state_dict(), tmp_path / "plain.pth")
    model = small()
    new = hgrn_vision.load_checkpoint(model, tmp_path / "plain.pth", drop_head=True)
    assert new[:2] == ["head.weight", "head.bias"] and len(new) == 34
    assert torch.equal(model.blocks[0].mixer.theta, plain.blocks[0].mixer.theta)


def test_classifier_and_parameter_groups():
    model = small()
    assert model.get_classifier() is model.head
    model.reset_classifier(7, "max")
    assert model(images()).shape == (2, 7)
    model.reset_classifier(0)
    assert model(images()).shape == model.forward_head(model.forward_features(images())).shape == (2, 32)
    assert model.no_weight_decay() == {"lower_bound", "blocks.0.mixer.theta", "blocks.1.mixer.theta"}
    model = small()
    groups = param_groups_layer_decay(model, weight_decay=0.1, layer_decay=0.5)
    scale = {id(p): group["lr_scale"] for group in groups for p in group["params"]}
    named = {name: scale[id(p)] for name, p in model.named_parameters()}
    assert named["lower_bound"] == named["patch_embed.proj.weight"] < named["blocks.0.mlp.fc1.weight"]
    # new parameters learn as fast as the head
    assert {rate for name, rate in named.items() if name.startswith("pyramid.")} == {named["head.weight"]} == {1.0}


def test_init_weights_dtype_deepcopy_and_pickle():
    meta = small(device="meta")
    assert all(t.is_meta for t in [*meta.parameters(), *meta.buffers()])
    meta.to_empty(device="cpu").init_weights()
    x = images()
    assert all(torch.isfinite(y).all() for y in meta.forward_intermediates(x, intermediates_only=True))
    assert all(p.dtype == torch.bfloat16 for p in small(dtype=torch.bfloat16).parameters())
    model = small().eval()
    want = model.forward_intermediates(x, intermediates_only=True)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        torch.testing.assert_close(twin.forward_intermediates(x, intermediates_only=True), want, rtol=0, atol=0)


def test_grad_checkpointing_gives_the_same_gradients():
    model = small(features_only=True)
    x = images()

    def gradients():
        model.zero_grad()
        sum(y.square().mean() for y in model(x)).backward()
        return [p.grad.clone() for p in model.parameters()]

    plain, passes = gradients(), []
    model.model.blocks[0].register_forward_pre_hook(lambda *_: passes.append(1))
    model.model.set_grad_checkpointing()
    torch.testing.assert_close(gradients(), plain, rtol=0, atol=0)
    assert len(passes) == 2


def test_torchscript():
    model = small(scriptable=True, depth=1).eval()
    x = images((50, 70))
    scripted = torch.jit.script(model)
    torch.testing.assert_close(scripted(x), model(x), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(scripted.train()(x), model.train()(x), rtol=1e-5, atol=1e-6)


def test_export_with_dynamic_size():
    features = small(features_only=True, exportable=True, depth=1).eval()
    rows, columns = (torch.export.Dim(name, min=2, max=40) for name in ("rows", "columns"))
    program = torch.export.export(features, (images((96, 160)),), dynamic_shapes=({2: 32 * rows, 3: 32 * columns},))
    for size in (64, (96, 224)):
        x = images(size)
        torch.testing.assert_close(program.module()(x), features(x), rtol=1e-4, atol=1e-5)


def test_compile_fullgraph():
    features = small(features_only=True, depth=1).eval()
    x = images((50, 70))
    torch._dynamo.reset()
    compiled = torch.compile(features, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), features(x), rtol=1e-4, atol=1e-5)


def test_a_classifier_learns_as_the_plain_model_and_gives_every_parameter_a_gradient():
    plain = timm.create_model("hgrn_deit_tiny_patch16_224", **SMALL)
    model = small()
    model.load_state_dict(plain.state_dict())
    x = images()
    for network in (plain, model):
        network(x).square().mean().backward()
    want = {name: p.grad for name, p in plain.named_parameters()}
    got = {name: p.grad for name, p in model.named_parameters()}
    torch.testing.assert_close({name: got.pop(name) for name in want}, want, rtol=0, atol=0)
    assert len(got) == 32 and all(torch.equal(grad, torch.zeros_like(grad)) for grad in got.values())


def test_distributed_training_of_a_classifier_waits_for_no_map(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    try:
        model = nn.parallel.DistributedDataParallel(small())
        for _ in range(2):
            model(images()).sum().backward()
        assert all(p.grad is not None for p in model.parameters())
    finally:
        torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def smp():
    return pytest.importorskip("segmentation_models_pytorch", reason="needs the extra 'dense'")


@pytest.mark.parametrize("size", [224, (320, 480)], ids=str)
@pytest.mark.parametrize("name", ["Unet", "FPN", "UPerNet", "DeepLabV3Plus"])
def test_segmentation_models(smp, name, size):
    # a narrow model and decoder; smp has its own `depth`, so all twelve blocks stay
    options = dict(embed_dim=32)
    if name == "Unet":
        options["decoder_channels"] = (32, 16, 16, 8, 8)
    elif name == "FPN":
        options |= dict(decoder_pyramid_channels=32, decoder_segmentation_channels=32)
    else:
        options["decoder_channels"] = 16
    model = getattr(smp, name)("tu-hgrn_pyramid_tiny", encoder_weights=None, classes=3, **options)
    x = images(size)
    out = model(x)
    assert out.shape == (2, 3, *x.shape[2:])
    nn.functional.cross_entropy(out, torch.zeros(2, *x.shape[2:], dtype=torch.long)).backward()
    for parameter_name in ("patch_embed.proj.weight", "blocks.0.mixer.theta", "pyramid.0.conv.weight"):
        gradient = model.get_parameter(f"encoder.model.model.{parameter_name}").grad
        assert torch.isfinite(gradient).all() and gradient.any(), parameter_name


def test_a_whole_unet(smp):
    model = smp.Unet("tu-hgrn_pyramid_tiny", encoder_weights=None, classes=5).eval()
    with torch.no_grad():
        assert model(images(224, batch=1)).shape == (1, 5, 224, 224)


def test_weights_go_into_a_unet(smp, tmp_path):
    plain = timm.create_model("hgrn_deit_tiny_patch16_224", embed_dim=32, num_classes=10)
    torch.save(plain.state_dict(), tmp_path / "plain.pth")
    overlay = dict(file=str(tmp_path / "plain.pth"), num_classes=10)
    model = smp.Unet("tu-hgrn_pyramid_tiny", encoder_weights=True, embed_dim=32, pretrained_cfg_overlay=overlay)
    assert torch.equal(model.encoder.model.model.lower_bound, plain.lower_bound)
    assert torch.equal(model.encoder.model.model.blocks[1].mlp.fc1.weight, plain.blocks[1].mlp.fc1.weight)


def test_dpt_over_the_plain_patch_16_model(smp):
    options = dict(
        encoder_weights=None, classes=2, decoder_intermediate_channels=(16, 16, 16, 16), decoder_fusion_channels=16
    )
    model = smp.DPT("tu-hgrn_deit_tiny_patch16_224", decoder_readout="ignore", embed_dim=32, **options)
    for size in (224, (320, 480)):
        x = images(size, batch=1)
        out = model(x)
        assert out.shape == (1, 2, *x.shape[2:])
        out.square().mean().backward()
    assert model.encoder.model.blocks[0].mixer.theta.grad.any()


class FpnBackbone(nn.Module):
    """The maps with the names and the single width that torchvision's detectors expect."""

    def __init__(self, channels=16, **kwargs):
        super().__init__()
        from torchvision.ops import FeaturePyramidNetwork

        self.body = timm.create_model("hgrn_pyramid_tiny", features_only=True, **kwargs)
        self.fpn = FeaturePyramidNetwork(self.body.feature_info.channels(), channels)
        self.out_channels = channels

    def forward(self, x):
        return self.fpn({str(i): y for i, y in enumerate(self.body(x))})


@pytest.mark.parametrize("size", [224, (320, 480)], ids=str)
@pytest.mark.parametrize("name", ["FasterRCNN", "RetinaNet"])
def test_torchvision_detectors(name, size):
    from torchvision.models import detection
    from torchvision.models.detection.anchor_utils import AnchorGenerator

    anchors = AnchorGenerator(tuple((side,) for side in (16, 32, 64, 128)), ((1.0,),) * 4)
    options = dict(anchor_generator=anchors) if name == "RetinaNet" else dict(rpn_anchor_generator=anchors)
    if name == "FasterRCNN":
        from torchvision.ops import MultiScaleRoIAlign

        options["box_roi_pool"] = MultiScaleRoIAlign(["0", "1", "2", "3"], output_size=7, sampling_ratio=2)
    side = size if isinstance(size, int) else min(size)
    model = getattr(detection, name)(
        FpnBackbone(embed_dim=32, depth=2), num_classes=3, min_size=side, max_size=2 * side, **options
    )
    x = images(size, batch=1)[0]
    target = dict(boxes=torch.tensor([[10.0, 20.0, 90.0, 120.0]]), labels=torch.tensor([1]))
    losses = model([x], [target])
    sum(losses.values()).backward()
    for parameter_name in ("patch_embed.proj.weight", "blocks.0.mixer.theta"):
        gradient = model.get_parameter(f"backbone.body.model.{parameter_name}").grad
        assert torch.isfinite(gradient).all() and gradient.any(), parameter_name
    model.eval()
    with torch.no_grad():
        (found,) = model([x])
    assert set(found) == {"boxes", "labels", "scores"}


def test_the_readmes_example_of_maps_runs(smp):
    blocks = (Path(__file__).parents[2] / "README.md").read_text().split("```python\n")[1:]
    (example,) = [block for block in (text.split("```")[0] for text in blocks) if "hgrn_pyramid_tiny" in block]
    names = {}
    exec(example, names)
    assert names["masks"].shape == (1, 21, 320, 480)
    assert [tuple(y.shape[1:]) for y in names["maps"].values()] == [(256, 320 // s, 480 // s) for s in (4, 8, 16, 32)]
