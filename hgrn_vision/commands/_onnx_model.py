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
        self.model.blocks = nn.ModuleList(map(_laid_out, model.blocks))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x, grid = self.model.embed(images)
        x = x.unflatten(1, grid).permute(2, 1, 0, 3).contiguous()
        for block, lower_bound in zip(self.model.blocks, self.model.layer_bounds(), strict=False):
            x = block(x, lower_bound, grid)
        return self.model.forward_head(x.permute(2, 1, 0, 3).flatten(1, 2))


def _laid_out(block: nn.Module) -> nn.Module:
    """A block for tokens (W, H, B, D)."""
    block = copy.copy(block)
    # an ablated mixer has no layout of its own
    block._modules = {
        **block._modules,
        "mixer": (OnnxHgru if type(block.mixer) is Hgru else TokensFirst)(block.mixer),
        "mlp": OnnxGlu(block.mlp),
    }
    return block


class TokensFirst(nn.Module):
    """Any mixer, between two transpositions."""

    def __init__(self, mixer: Hgru):
        super().__init__()
        self.mixer = mixer

    def forward(
        self, x: torch.Tensor, lower_bound: torch.Tensor, residual: torch.Tensor, grid: tuple[int, int]
    ) -> torch.Tensor:
        x = self.mixer(x.permute(2, 1, 0, 3).flatten(1, 2), lower_bound, None, grid)
        return residual + x.unflatten(1, grid).permute(2, 1, 0, 3)


class OnnxHgru(nn.Module):
    """Hgru with a projection for each of its parts, since runtimes copy what they split."""

    def __init__(self, mixer: Hgru):
        super().__init__()
        self.mixer = mixer
        D, weight, bias = mixer.dim, mixer.in_proj.weight, mixer.in_proj.bias
        self.candidate = _linear(weight[: 2 * D], bias[: 2 * D])
        # negative: 1 - sigmoid(f) would cancel where the decay is near 1
        self.input_gate = _linear(-weight[2 * D : 3 * D], -bias[2 * D : 3 * D])
        self.output_gate = _linear(weight[3 * D :], bias[3 * D :]) if mixer.output_gate else None

    def forward(
        self, x: torch.Tensor, lower_bound: torch.Tensor, residual: torch.Tensor, grid: tuple[int, int]
    ) -> torch.Tensor:
        mixer = self.mixer
        if mixer.local_conv is not None:
            x = F.conv2d(x.permute(2, 3, 1, 0), mixer.local_conv.weight, padding="same", groups=mixer.dim)
            x = x.permute(3, 2, 0, 1)
        gate = torch.sigmoid(self.input_gate(x))  # (W, H, B, D)
        free = 1 - lower_bound
        c = F.silu(self.candidate(x)).unflatten(-1, (2, -1))
        # the states are linear in their inputs: what is left out of these is in the last rotation
        inputs = gate.unsqueeze(-2) * c
        decay = (1 - free * gate).unsqueeze(-2)
        theta = mixer.theta.double()
        if mixer.scan == "2d":
            h = scan_lines(decay, inputs, theta, free)
            columns = scan_lines(decay.transpose(0, 1), inputs.transpose(0, 1), theta, free)
            h = h + columns.transpose(0, 1)
        else:
            h = scan_rows(decay, inputs, theta, free)
        if self.output_gate is None:
            return mixer.out_proj(mixer.norm(h), residual)
        if mixer.gate_after_norm:
            return mixer.out_proj(mixer.norm(h) * F.silu(self.output_gate(x)), residual)
        return mixer.out_proj(mixer.norm(h * torch.sigmoid(self.output_gate(x))), residual)


class OnnxGlu(nn.Module):
    """Glu with a projection for each of its halves."""

    def __init__(self, mlp: Glu):
        super().__init__()
        self.mlp = mlp
        self.gate, self.value = map(_linear, mlp.fc1.weight.chunk(2), mlp.fc1.bias.chunk(2))

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return self.mlp.fc2(self.mlp.act(self.gate(x)) * self.value(x), residual)


def _linear(weight: torch.Tensor, bias: torch.Tensor) -> nn.Linear:
    linear = nn.Linear(weight.shape[1], weight.shape[0], device="meta")
    linear.weight, linear.bias = (nn.Parameter(tensor.detach(), requires_grad=False) for tensor in (weight, bias))
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
    W, H, B, _, D = x.shape
    units = _units(theta, torch.arange(W, device=x.device))
    row_units = _units(theta, W * torch.arange(H, device=x.device))
    inputs = [_rotate(x, cos, -sin) for cos, sin in units]
    *leaving, reach = _last_states(decay, inputs)
    # both in a frame that turns with the rows
    leaving = [_rotate(h, cos, -sin) for h, (cos, sin) in zip(leaving, row_units, strict=True)]
    none = x.new_zeros(1, B, 2, D)
    entering = []
    for k, h in enumerate(_all_states(reach, leaving, [none[0]] * len(leaving))):
        h = torch.cat([none, h.narrow(0, 0, H - 1)] if k == 0 else [h.narrow(0, 1, H - 1), none])
        entering.append(_rotate(h, *row_units[k]))
    states = _all_states(decay, inputs, entering)
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


def _symbolic(name, starts, decay, inputs, shapes) -> Sequence[torch.Tensor]:
    dtypes = [decay.dtype] * len(shapes)
    operands = [*starts, decay.contiguous(), *(x.contiguous() for x in inputs)]
    attributes = {"directions": len(inputs)}
    return torch.onnx.ops.symbolic_multi_out(
        f"{DOMAIN}::{name}", operands, attributes, dtypes=dtypes, shapes=shapes, version=1
    )


def expand_scans(model: "ir.Model") -> None:
    """Replace what _symbolic has left in a graph by ONNX's Scan."""
    import onnx_ir as ir

    for node in list(model.graph):
        if node.domain != DOMAIN:
            continue
        count = node.attributes["directions"].as_int()
        *starts, decay = node.inputs[:-count]
        inputs = node.inputs[-count:]
        ways = list(range(count))  # 0 is from the first to the last, 1 from the last to the first
        attributes = {"num_scan_inputs": 2 * count, "scan_input_directions": ways * 2}
        if node.op_type == "AllStates":
            attributes["scan_output_directions"] = ways
        attributes["body"] = _step(starts, decay, inputs, node.op_type == "AllStates")
        scan = ir.node(
            "Scan", [*starts, *[decay] * count, *inputs], attributes, num_outputs=len(attributes["body"].outputs)
        )
        for old, new in zip(node.outputs, scan.outputs[-len(node.outputs) :], strict=True):
            new.name, new.shape, new.type = old.name, old.shape, old.type
        ir.convenience.replace_nodes_and_values(
            model.graph, node, [node], [scan], node.outputs, scan.outputs[-len(node.outputs) :]
        )
    model.graph.opset_imports.pop(DOMAIN, None)


def _step(starts: Sequence["ir.Value"], decay: "ir.Value", inputs: Sequence["ir.Value"], keep: bool) -> "ir.Graph":
    """The body of a Scan: h = decay h + x in each direction, and either all h, or the product of decays."""
    import onnx_ir as ir

    def value(name: str, like: "ir.Value", sliced: bool) -> "ir.Value":
        return ir.Value(name=name, shape=ir.Shape(like.shape[sliced:]), type=like.type)

    before = [value(f"before_{i}", start, False) for i, start in enumerate(starts)]
    decays = [value(f"decay_{k}", decay, True) for k in range(len(inputs))]
    xs = [value(f"x_{k}", x, True) for k, x in enumerate(inputs)]
    nodes, after, kept = [], [], []

    def add(operator: str, operands: list["ir.Value"], name: str) -> "ir.Value":
        nodes.append(ir.node(operator, operands))
        (out,) = nodes[-1].outputs
        out.name, out.shape, out.type = name, operands[-1].shape, operands[-1].type
        return out

    for k, x in enumerate(xs):
        h = add("Mul", [decays[k], before[k]], f"faded_{k}")
        after.append(add("Add", [h, x], f"after_{k}"))
        if keep:
            # a runtime refuses one value as two outputs
            kept.append(add("Identity", [after[k]], f"state_{k}"))
    if not keep:
        after.append(add("Mul", [decays[0], before[-1]], "reach"))
    return ir.Graph([*before, *decays, *xs], [*after, *kept], nodes=nodes, opset_imports={"": OPSET}, name="step")
