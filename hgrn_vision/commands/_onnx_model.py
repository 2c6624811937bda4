"""A model laid out for runtimes of ONNX, which run operators one by one: few, and each over memory in its own order.

Tokens are kept as (W, H, B, D), so that a step along all rows at once is one piece of memory, which ONNX's Scan hands
to its body without a copy. A sequence of all tokens is scanned in three parts: along the rows for the state that leaves
each if none enters it, from row to row for those that do enter, and along the rows once more. As in
kernels/torch_scan.py the rotation is taken out of the recurrence first; here angles count from the start of a row.
"""

import copy
import math
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


class OnnxModel(nn.Module):
    """The same function as a model, whose weights it shares."""

    def __init__(self, model: HgrnDeit):
        super().__init__()
        self.model = copy.copy(model)
        self.model._modules = dict(model._modules)
        self.mixers, self.mlps = nn.ModuleList(), nn.ModuleList()
        for block in model.blocks:
            # an ablated mixer has no layout of its own
            mixer = OnnxHgru if type(block.mixer) is Hgru else TokensFirst
            self.mixers.append(mixer(block.norm1, block.mixer))
            self.mlps.append(OnnxGlu(block.norm2, block.mlp))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x, grid = self.model.embed(images)
        x = x.unflatten(1, grid).permute(2, 1, 0, 3).contiguous()
        for mixer, mlp, lower_bound in zip(self.mixers, self.mlps, self.model.layer_bounds(), strict=False):
            x = mlp(mixer(x, lower_bound, grid))
        return self.model.forward_head(x.permute(2, 1, 0, 3).flatten(1, 2))


class TokensFirst(nn.Module):
    """The first half of a block with any mixer, between two transpositions."""

    def __init__(self, norm: nn.Module, mixer: Hgru):
        super().__init__()
        self.norm, self.mixer = norm, mixer

    def forward(self, x: torch.Tensor, lower_bound: torch.Tensor, grid: tuple[int, int]) -> torch.Tensor:
        mixed = self.mixer(self.norm(x).permute(2, 1, 0, 3).flatten(1, 2), lower_bound, None, grid)
        return x + mixed.unflatten(1, grid).permute(2, 1, 0, 3)


class OnnxHgru(nn.Module):
    """The first half of a block, with a projection for each of its parts, since runtimes copy what they split."""

    def __init__(self, norm: nn.Module, mixer: Hgru):
        super().__init__()
        self.mixer = mixer
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

    def forward(self, x: torch.Tensor, lower_bound: torch.Tensor, grid: tuple[int, int]) -> torch.Tensor:
        mixer, residual = self.mixer, x
        x = self.norm(x)
        if mixer.local_conv is not None:
            x = F.conv2d(x.permute(2, 3, 1, 0), mixer.local_conv.weight, padding="same", groups=mixer.dim)
            x = x.permute(3, 2, 0, 1)
        candidate, input_gate, *output_gate = self.projections
        gate = torch.sigmoid(input_gate(x))  # (W, H, B, D)
        free = 1 - lower_bound
        # the states are linear in their inputs: what is left out of these is in the last rotation
        inputs = gate.unsqueeze(-2) * F.silu(candidate(x)).unflatten(-1, (2, -1))
        decay = (1 - free * gate).unsqueeze(-2)
        theta = mixer.theta.double()
        if mixer.scan == "2d":
            h = scan_lines(decay, inputs, theta, free)
            columns = scan_lines(decay.transpose(0, 1), inputs.transpose(0, 1), theta, free)
            h = h + columns.transpose(0, 1)
        else:
            h = scan_rows(decay, inputs, theta, free)
        # last, so that it is still in a cache when it is used
        gates = [projection(x) for projection in output_gate]
        if mixer.gate_after_norm:
            h = self.state_norm(h) * F.silu(gates[0])
        else:
            h = self.state_norm(h * torch.sigmoid(gates[0]) if gates else h)
        return residual + self.out_proj(h)


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
    channels is all that the mean of a row of weights meets, and this mean can carry the bias. In onnxruntime the biases
    take a seventh of the time of hgrn_deit_tiny.
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


def scan_lines(decay: torch.Tensor, x: torch.Tensor, theta: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Sum over directions of h_l = decay_l exp(i theta) h_(l-1) + scale x_l along the first axis, (L, M, B, 2D).

    Args:
        decay: (L, M, B, 1, D).
        x: real and imaginary parts, (L, M, B, 2, D).
        theta: of each direction, (K, D), in float64.
        scale: (D,).
    """
    L, M, B, _, D = x.shape
    units = _units(theta, torch.arange(L, device=x.device))
    start = x.new_zeros(M, B, 2, D)
    states = _all_states(decay, [_rotate(x, cos, -sin) for cos, sin in units], [start] * len(units))
    return sum(_rotate(h, scale * cos, scale * sin) for h, (cos, sin) in zip(states, units, strict=True)).flatten(-2)


def scan_rows(decay: torch.Tensor, x: torch.Tensor, theta: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """scan_lines along all tokens of (W, H, B, ...), row by row."""
    W = x.shape[0]
    units = _units(theta, torch.arange(W, device=x.device))
    inputs = [_rotate(x, cos, -sin) for cos, sin in units]
    *leaving, reach = _last_states(decay, inputs)
    row = _units(theta, torch.arange(W, W + 1, device=x.device))
    states = _all_states(decay, inputs, _entering_states(reach, leaving, row))
    return sum(_rotate(h, scale * cos, scale * sin) for h, (cos, sin) in zip(states, units, strict=True)).flatten(-2)


def _units(theta: torch.Tensor, positions: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Real and imaginary parts of exp(i theta n) at each position n, (L, 1, D), the second direction from the end."""
    # exact without float64 in the graph: whole turns are dropped from products that float32 holds, 14 bits by 10
    turns = theta / (2 * math.pi)
    turns = turns - turns.floor()
    positions = positions.float().view(-1, 1, 1)
    units = []
    for k, rest in enumerate(turns):
        angles = torch.zeros_like(positions)
        for bits in (10, 20):
            part = (rest * 2**bits).round() / 2**bits
            rest = rest - part
            turned = positions * part.float()
            angles = angles + (turned - turned.floor())
        angles = (angles + positions * rest.float()) * (2 * math.pi)
        if k == 1:
            angles = angles.flip(0)
        units.append((angles.cos(), angles.sin()))
    return units


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x (L, ..., 2, D), turned by cos and sin (L, 1, D)."""
    heads = x.reshape(x.shape[0], -1, 1, 2 * x.shape[-1])
    return torch.onnx.ops.rotary_embedding(heads, cos, sin).reshape(x.shape)


def _last_states(decay: torch.Tensor, inputs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """The states after a scan from zero of one or two inputs, the second from its end; and the product of decays."""
    starts = [*[decay.new_zeros(inputs[0].shape[1:])] * len(inputs), decay.new_ones(decay.shape[1:])]
    return _symbolic("LastStates", starts, decay, inputs, [start.shape for start in starts])


def _all_states(
    decay: torch.Tensor, inputs: Sequence[torch.Tensor], starts: Sequence[torch.Tensor]
) -> Sequence[torch.Tensor]:
    """h_l = decay_l h_(l-1) + x_l along the first axis of one or two inputs, the second from its end."""
    return _symbolic("AllStates", starts, decay, inputs, [x.shape for x in inputs])


def _entering_states(
    reach: torch.Tensor, leaving: Sequence[torch.Tensor], row: Sequence[tuple[torch.Tensor, torch.Tensor]]
) -> Sequence[torch.Tensor]:
    """The state that enters each row, (H, B, 2, D), for each direction.

    Args:
        reach: product of each row's decays, (H, B, 1, D).
        leaving: the state after each row if none enters it, (H, B, 2, D), for each direction.
        row: cosine and sine of the angle that a row turns, (1, 1, D), for each direction.
    """
    H, B, _, D = reach.shape
    heads = (H, 1, B, 1, 2 * D)  # as RotaryEmbedding expects them, behind H
    reach = torch.cat([reach, reach], -1).reshape(heads)
    leaving = [h.reshape(heads) for h in leaving]
    starts = [reach.new_zeros(heads[1:])] * len(leaving)
    shapes = [heads] * len(leaving)
    entering = _symbolic("EnteringStates", starts, reach, leaving, shapes, [unit for units in row for unit in units])
    return [h.reshape(H, B, 2, D) for h in entering]


def _symbolic(name, starts, decay, inputs, shapes, units=()) -> Sequence[torch.Tensor]:
    dtypes = [decay.dtype] * len(shapes)
    operands = [*units, *starts, decay.contiguous(), *(x.contiguous() for x in inputs)]
    attributes = {"directions": len(inputs), "units": len(units)}
    return torch.onnx.ops.symbolic_multi_out(
        f"{DOMAIN}::{name}", operands, attributes, dtypes=dtypes, shapes=shapes, version=1
    )


def expand_scans(model: "ir.Model") -> None:
    """Replace what _symbolic has left in a graph by ONNX's Scan."""
    import onnx_ir as ir

    for node in list(model.graph):
        if node.domain != DOMAIN:
            continue
        count, turned = (node.attributes[name].as_int() for name in ("directions", "units"))
        units, operands = node.inputs[:turned], node.inputs[turned:]
        *starts, decay = operands[:-count]
        inputs = operands[-count:]
        ways = list(range(count))  # 0 is from the first to the last, 1 from the last to the first
        attributes = {"num_scan_inputs": 2 * count, "scan_input_directions": ways * 2}
        if node.op_type != "LastStates":
            attributes["scan_output_directions"] = ways
        attributes["body"] = _step(node.op_type, starts, decay, inputs, units)
        scan = ir.node(
            "Scan", [*starts, *[decay] * count, *inputs], attributes, num_outputs=len(attributes["body"].outputs)
        )
        for old, new in zip(node.outputs, scan.outputs[-len(node.outputs) :], strict=True):
            new.name, new.shape, new.type = old.name, old.shape, old.type
        ir.convenience.replace_nodes_and_values(
            model.graph, node, [node], [scan], node.outputs, scan.outputs[-len(node.outputs) :]
        )
    model.graph.opset_imports.pop(DOMAIN, None)


def _step(
    kind: str,
    starts: Sequence["ir.Value"],
    decay: "ir.Value",
    inputs: Sequence["ir.Value"],
    units: Sequence["ir.Value"],
) -> "ir.Graph":
    """The body of a Scan: h = decay h + x in each direction, and what is kept of it.

    Args:
        kind: AllStates keeps every h; LastStates the last, and the product of decays; EnteringStates every h before
            its step, and turns h after it.
        starts, decay, inputs: what is scanned.
        units: cosine and sine of each direction's turn.
    """
    import onnx_ir as ir

    def value(name: str, like: "ir.Value", sliced: bool) -> "ir.Value":
        return ir.Value(name=name, shape=ir.Shape(like.shape[sliced:]), type=like.type)

    before = [value(f"before_{i}", start, False) for i, start in enumerate(starts)]
    decays = [value(f"decay_{k}", decay, True) for k in range(len(inputs))]
    xs = [value(f"x_{k}", x, True) for k, x in enumerate(inputs)]
    nodes, after, kept = [], [], []

    def add(operator: str, operands: list["ir.Value"], name: str, like: "ir.Value") -> "ir.Value":
        nodes.append(ir.node(operator, operands))
        (out,) = nodes[-1].outputs
        out.name, out.shape, out.type = name, like.shape, like.type
        return out

    for k, x in enumerate(xs):
        h = add("Mul", [decays[k], before[k]], f"faded_{k}", x)
        h = add("Add", [h, x], f"summed_{k}", x)
        if kind == "EnteringStates":
            h = add("RotaryEmbedding", [h, *units[2 * k : 2 * k + 2]], f"turned_{k}", x)
        after.append(h)
        # copies, since a runtime refuses one value as two outputs
        if kind == "AllStates":
            kept.append(add("Identity", [h], f"state_{k}", x))
        elif kind == "EnteringStates":
            kept.append(add("Identity", [before[k]], f"entering_{k}", x))
    if kind == "LastStates":
        after.append(add("Mul", [decays[0], before[-1]], "reach", before[-1]))
    return ir.Graph([*before, *decays, *xs], [*after, *kept], nodes=nodes, opset_imports={"": OPSET}, name="step")
