"""A model laid out for runtimes of ONNX, which run operators one by one: few, and each over memory in its own order.

Recurrences are ONNX's Scan, which hands its body one piece of memory per step without a copy. So tokens come first, as
(N, B, D). Both directions of a sequence share each step if tokens are in pairs: the first with the last, the second
with the last but one, and so on to the middle. A first Scan goes inwards, forwards on the first token of each pair and
backwards on the second. There the two states change places, and a second Scan takes them outwards over the same pairs.

Scans put out decay h, without the input x of their step: h itself is a state of the Scan too, which would be a copy.
"""

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import nn

from ..hgrn import HgrnDeit
from ..layers import Glu, Hgru

if TYPE_CHECKING:
    import onnx_ir as ir

OPSET = 23  # the first with RotaryEmbedding
DOMAIN = "hgrn_vision"  # of operators that expand_scans replaces
Turns = tuple[torch.Tensor, torch.Tensor]  # cosine and sine of theta of each direction, (K, D)


class OnnxModel(nn.Module):
    """The same function as a model, whose weights it shares."""

    def __init__(self, model: HgrnDeit):
        super().__init__()
        self.model = copy.copy(model)
        self.model._modules = dict(model._modules)
        # an ablated mixer has no layout of its own
        own = [type(block.mixer) is Hgru for block in model.blocks]
        self.pairs = all(own) and all(_is_paired(block.mixer) for block in model.blocks)
        self.mixers, self.mlps = nn.ModuleList(), nn.ModuleList()
        for block, has_layout in zip(model.blocks, own, strict=True):
            if has_layout:
                self.mixers.append(OnnxHgru(block.norm1, block.mixer, self.pairs))
            else:
                self.mixers.append(TokensSecond(block.norm1, block.mixer))
            self.mlps.append(OnnxGlu(block.norm2, block.mlp))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x, grid = self.model.embed(images)
        x = x.transpose(0, 1)
        x = into_pairs(x) if self.pairs else x.contiguous()
        for mixer, mlp, lower_bound in zip(self.mixers, self.mlps, self.model.layer_bounds(), strict=False):
            x = mlp(mixer(x, lower_bound, grid))
        if self.pairs:
            x = out_of_pairs(x, grid[0] * grid[1])
        return self.model.forward_head(x.transpose(0, 1))


class TokensSecond(nn.Module):
    """The first half of a block with any mixer, between two transpositions."""

    def __init__(self, norm: nn.Module, mixer: Hgru):
        super().__init__()
        self.norm, self.mixer = norm, mixer

    def forward(self, x: torch.Tensor, lower_bound: torch.Tensor, grid: tuple[int, int]) -> torch.Tensor:
        return x + self.mixer(self.norm(x).transpose(0, 1), lower_bound, None, grid).transpose(0, 1)


class OnnxHgru(nn.Module):
    """The first half of a block, with a projection for each of its parts, since runtimes copy what they split."""

    def __init__(self, norm: nn.Module, mixer: Hgru, pairs: bool):
        super().__init__()
        self.mixer, self.pairs = mixer, pairs
        D, weight, bias = mixer.dim, mixer.in_proj.weight, mixer.in_proj.bias
        projections = [
            _linear(weight[: 2 * D], bias[: 2 * D]),
            # negative: 1 - sigmoid(f) would cancel where the decay is near 1
            _linear(-weight[2 * D : 3 * D], -bias[2 * D : 3 * D]),
        ]
        if mixer.output_gate:
            projections.append(_linear(weight[3 * D :], bias[3 * D :]))
        # beyond the image, a convolution has zeros where the norm has none
        if mixer.local_conv is None:
            norm, projections = without_biases(norm, projections)
        self.norm, self.projections = norm, nn.ModuleList(projections)
        self.state_norm, self.out_proj = mixer.norm, mixer.out_proj
        if not mixer.gate_after_norm:
            self.state_norm, [self.out_proj] = without_biases(mixer.norm, [mixer.out_proj])
        theta = mixer.theta.detach().double()
        self.turns = theta.cos().to(mixer.theta.dtype), theta.sin().to(mixer.theta.dtype)  # (K, D)

    def forward(self, x: torch.Tensor, lower_bound: torch.Tensor, grid: tuple[int, int]) -> torch.Tensor:
        mixer, residual = self.mixer, x
        x = self.norm(x)
        if mixer.local_conv is not None:
            x = self._convolve(x, grid)
        candidate, input_gate, *output_gate = self.projections
        free_gate = (1 - lower_bound) * torch.sigmoid(input_gate(x))  # (N, B, D)
        inputs = (free_gate.unsqueeze(-2) * F.silu(candidate(x)).unflatten(-1, (2, -1))).flatten(-2)
        decay = 1 - free_gate
        if self.pairs:
            h = scan_pairs(decay, inputs, self.turns, grid[0] * grid[1]) + 2 * inputs
        elif mixer.scan == "2d":
            columns = [tensor.unflatten(0, grid) for tensor in (decay, inputs)]
            rows = [tensor.transpose(0, 1) for tensor in columns]
            h = scan_lines(*columns, self.turns) + scan_lines(*rows, self.turns).transpose(0, 1)
            h = h.flatten(0, 1) + 2 * len(mixer.theta) * inputs
        else:
            h = scan_lines(decay, inputs, self.turns) + inputs
        # last, so that it is still in a cache when it is used
        gates = [projection(x) for projection in output_gate]
        if mixer.gate_after_norm:
            h = self.state_norm(h) * F.silu(gates[0])
        else:
            h = self.state_norm(h * torch.sigmoid(gates[0]) if gates else h)
        return residual + self.out_proj(h)

    def _convolve(self, x: torch.Tensor, grid: tuple[int, int]) -> torch.Tensor:
        if self.pairs:
            x = out_of_pairs(x, grid[0] * grid[1])
        x = x.unflatten(0, grid).permute(2, 3, 0, 1)
        x = F.conv2d(x, self.mixer.local_conv.weight, padding="same", groups=self.mixer.dim)
        x = x.permute(2, 3, 0, 1).flatten(0, 1)
        return into_pairs(x) if self.pairs else x


def _is_paired(mixer: Hgru) -> bool:
    return mixer.scan == "1d" and len(mixer.theta) == 2


class OnnxGlu(nn.Module):
    """The second half of a block, with a projection for each half of its GLU."""

    def __init__(self, norm: nn.Module, mlp: Glu):
        super().__init__()
        self.mlp = mlp
        halves = map(_linear, mlp.fc1.weight.chunk(2), mlp.fc1.bias.chunk(2))
        self.norm, (self.gate, self.value) = without_biases(norm, list(halves))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        residual, x = x, self.norm(x)
        return residual + self.mlp.fc2(self.mlp.act(self.gate(x)) * self.value(x))


def without_biases(norm: nn.Module, linears: list[nn.Linear]) -> tuple[nn.Module, list[nn.Linear]]:
    """A norm and the linear layers that take its output, with the same results but no biases to add.

    A LayerNorm's output, before its own weight and bias, sums to zero over channels. So a constant that is added to all
    channels is all that the mean of a row of weights meets, and this mean can carry the bias. Without biases to add,
    hgrn_deit_tiny is 5 to 8% faster in onnxruntime.
    """
    if type(norm) is not nn.LayerNorm or norm.weight is None or norm.bias is None:
        return norm, linears
    # small, so that the constant adds little to the range that is quantized, but not so small that the means do
    constant = 0.25
    without = []
    for linear in linears:
        weight = linear.weight.double()
        bias = weight @ norm.bias.double() + linear.bias.double()
        weight = weight * norm.weight.double()
        weight = weight - weight.mean(1, keepdim=True) + bias.unsqueeze(1) / (constant * weight.shape[1])
        without.append(_linear(weight.to(linear.weight.dtype), None))
    plain = nn.LayerNorm(norm.normalized_shape, norm.eps, dtype=norm.weight.dtype)
    nn.init.constant_(plain.bias, constant)
    return plain.requires_grad_(False), without


def _linear(weight: torch.Tensor, bias: torch.Tensor | None) -> nn.Linear:
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias is not None, device="meta")
    linear.weight = nn.Parameter(weight.detach(), requires_grad=False)
    if bias is not None:
        linear.bias = nn.Parameter(bias.detach(), requires_grad=False)
    return linear


def into_pairs(x: torch.Tensor) -> torch.Tensor:
    """Tokens (T, ...) as the first, the last, the second, the last but one, ...; one in the middle comes twice."""
    T = x.shape[0]
    pair = torch.arange((T + 1) // 2, device=x.device)
    return x.index_select(0, torch.stack([pair, T - 1 - pair], 1).flatten())


def out_of_pairs(x: torch.Tensor, T: int) -> torch.Tensor:
    """The T tokens of into_pairs in their order."""
    token = torch.arange(T, device=x.device)
    return x.index_select(0, torch.minimum(2 * token, 2 * (T - 1 - token) + 1))


def scan_pairs(decay: torch.Tensor, x: torch.Tensor, turns: Turns, T: int) -> torch.Tensor:
    """Sum over both directions of decay_t exp(i theta) h_(t-1), where h_t is this plus x_t; of T tokens in pairs.

    Args:
        decay: (N, B, D), N = T or, if T is odd, T + 1.
        x: real and imaginary parts, (N, B, 2D).
        turns: of the two directions.
        T: how many tokens.
    """
    if isinstance(T, int) and T == 1:
        return torch.zeros_like(x)
    in_pairs, exchanged = x.shape, torch.tensor([1, 0], device=x.device)
    decay, x = (tensor.unflatten(0, (-1, 2)) for tensor in (decay, x))  # (pairs, 2, B, ...)
    turned = [decay * unit.unsqueeze(1) for unit in turns]
    [inwards] = _scan([x], [turned], [x.new_zeros(x.shape[1:])], [0])
    # a token in the middle is reached from both sides on the way in, and once more on the way out
    crossing = torch.full((1,), T // 2 - 1, device=x.device)
    start = (inwards.index_select(0, crossing) + x.index_select(0, crossing)).index_select(1, exchanged)
    turned = [decay * unit.flip(0).unsqueeze(1) for unit in turns]
    [outwards] = _scan([x], [turned], [start], [1])
    return (inwards + outwards).view(in_pairs)


def scan_lines(decay: torch.Tensor, x: torch.Tensor, turns: Turns) -> torch.Tensor:
    """Sum over directions of decay_l exp(i theta) h_(l-1) along the first axis, where h_l is this plus x_l.

    Args:
        decay: (L, ..., D).
        x: real and imaginary parts, (L, ..., 2D).
        turns: of each direction.
    """
    turned = [[decay * unit for unit in direction] for direction in zip(*turns, strict=True)]
    K = len(turned)
    return sum(_scan([x] * K, turned, [x.new_zeros(x.shape[1:])] * K, list(range(K))))


def _scan(
    inputs: list[torch.Tensor], turned: list[Sequence[torch.Tensor]], starts: list[torch.Tensor], ways: list[int]
) -> list[torch.Tensor]:
    """For one or two sequences, h = decay exp(i theta) h + x step by step: all decay exp(i theta) h.

    Args:
        inputs: x, (L, ..., 2D).
        turned: decay cos(theta) and decay sin(theta), (L, ..., D).
        starts: h before the first step, (..., 2D).
        ways: 0 from the first step to the last, 1 from the last to the first.
    """
    # with the axes that RotaryEmbedding expects
    heads = [h.reshape(-1, 1, 1, h.shape[-1]) for h in starts]
    cosines_and_sines = [unit for units in zip(*turned, strict=True) for unit in units]
    units = [unit.reshape(unit.shape[0], -1, 1, unit.shape[-1]) for unit in cosines_and_sines]
    steps = [x.reshape(x.shape[0], -1, 1, 1, x.shape[-1]) for x in inputs]
    results = torch.onnx.ops.symbolic_multi_out(
        f"{DOMAIN}::Recurrence",
        [*heads, *units, *steps],
        {"ways": ways},
        dtypes=[inputs[0].dtype] * 2 * len(ways),
        shapes=[tensor.shape for tensor in (*heads, *steps)],
        version=1,
    )
    # the last states come before
    return [h.view(x.shape) for h, x in zip(results[len(ways) :], inputs, strict=True)]


def expand_scans(model: "ir.Model") -> None:
    """Replace what _scan has left in a graph by ONNX's Scan."""
    import onnx_ir as ir

    for node in list(model.graph):
        if node.domain != DOMAIN:
            continue
        ways = list(node.attributes["ways"].as_ints())
        attributes = {
            "num_scan_inputs": 3 * len(ways),
            "scan_input_directions": ways * 3,
            "scan_output_directions": ways,
            "body": _step(node.inputs, len(ways)),
        }
        scan = ir.node("Scan", node.inputs, attributes, num_outputs=len(node.outputs))
        for old, new in zip(node.outputs, scan.outputs, strict=True):
            new.name, new.shape, new.type = old.name, old.shape, old.type
        ir.convenience.replace_nodes_and_values(model.graph, node, [node], [scan], node.outputs, scan.outputs)
    model.graph.opset_imports.pop(DOMAIN, None)


def _step(operands: Sequence["ir.Value"], directions: int) -> "ir.Graph":
    """The body of a Scan of states, cosines, sines and inputs: the states after a step, and what is put out."""
    import onnx_ir as ir

    names = [f"{name}_{k}" for name in ("before", "cos", "sin", "x") for k in range(directions)]
    # all but the states come in slices
    shapes = [value.shape[0 if i < directions else 1 :] for i, value in enumerate(operands)]
    values = [
        ir.Value(name=name, shape=ir.Shape(shape), type=operand.type)
        for name, shape, operand in zip(names, shapes, operands, strict=True)
    ]
    nodes, after, faded = [], [], []
    for k in range(directions):
        before, cos, sin, x = values[k::directions]
        nodes.append(ir.node("RotaryEmbedding", [before, cos, sin]))
        faded.append(nodes[-1].outputs[0])
        nodes.append(ir.node("Add", [faded[k], x]))
        after.append(nodes[-1].outputs[0])
        for name, out in (("faded", faded[k]), ("after", after[k])):
            out.name, out.shape, out.type = f"{name}_{k}", before.shape, before.type
    return ir.Graph(values, [*after, *faded], nodes=nodes, opset_imports={"": OPSET}, name="step")
