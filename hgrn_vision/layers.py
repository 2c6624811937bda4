"""The layers of HGRN: the HGRU token mixer and its ablations, the GLU channel mixer, and the lower bounds."""

from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from timm.layers import PatchEmbed, is_exportable, is_scriptable, register_notrace_function
from torch import nn

from .conv import local_conv
from .glu import glu
from .kernels.torch_scan import scan_tokens, turned_angles
from .recompute import recomputed
from .scan import check_grid, hgru_scan

SCANS = ("1d", "2d")
LOCAL_CONVS = (0, 3, 5)
LOWER_BOUNDS = ("increasing", "none", "independent", "decreasing")
FORGET_GATES = ("full", "bound_only", "none")


def check_choice(name: str, value: str | int, choices: tuple[str | int, ...]) -> None:
    if value not in choices:
        known = ", ".join(map(repr, choices))
        raise ValueError(f"{name} must be one of {known}, got {value!r}")


# it branches on dtypes and shapes, so symbolic tracing treats it as one step
register_notrace_function(scan_tokens)


@register_notrace_function
def lower_bounds(gamma: torch.Tensor, kind: str) -> torch.Tensor:
    """The lower bound of each layer's forget gate, (depth, D), from the parameter Gamma of the same shape."""
    if gamma.dtype != torch.float64:
        gamma = gamma.float()
    if kind == "independent":
        return gamma.sigmoid()
    # the paper's cumsum(P)_k - P_1, without the subtraction, so that the first bound is exactly 0
    p = gamma.softmax(dim=0)
    bounds = F.pad(p[1:].cumsum(dim=0), (0, 0, 1, 0))
    return bounds.flip(0) if kind == "decreasing" else bounds


@register_notrace_function
def zero_bounds(like: torch.Tensor, depth: int) -> torch.Tensor:
    """Lower bounds of zero for every layer, (depth, D), on the device of a weight `like` (D, ...)."""
    dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
    return torch.zeros(depth, like.shape[0], dtype=dtype, device=like.device)


def forget_gate(f: torch.Tensor, lower_bound: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The decay of the state from the pre-activation f, and 1 - decay."""
    # sigmoid(-f) rather than 1 - sigmoid(f), which loses precision where the gate is near 1
    return lower_bound + (1 - lower_bound) * torch.sigmoid(f), (1 - lower_bound) * torch.sigmoid(-f)


@register_notrace_function
def pad_to_patches(x: torch.Tensor, patch_size: tuple[int, int]) -> torch.Tensor:
    """Pad images (B, C, H, W) to whole patches, with zeros at the bottom and right."""
    bottom, right = -x.shape[2] % patch_size[0], -x.shape[3] % patch_size[1]
    # F.pad copies the batch even if there is nothing to pad
    return F.pad(x, [0, right, 0, bottom]) if bottom > 0 or right > 0 else x


class PaddedPatchEmbed(PatchEmbed):
    """timm's patch embedding, except that images that need no padding are not copied."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Token maps (B, H, W, D) of images; the model has already checked the images."""
        if self.dynamic_img_pad:
            x = pad_to_patches(x, self.patch_size)
        return self.norm(self.proj(x).permute(0, 2, 3, 1))


class DeferredBiasLinear(nn.Linear):
    """A linear layer that leaves its bias to the next operation, which adds it without an extra pass over memory."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight)


class ResidualLinear(nn.Linear):
    """A linear layer that can accumulate its output into a residual."""

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        if residual is None:
            return F.linear(x, self.weight, self.bias)
        return add_linear(residual, x, self.weight, self.bias)


@register_notrace_function
def add_linear(
    residual: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """residual + x W^T + bias; the matmul accumulates into residual + bias, which saves a pass over memory."""
    if torch.jit.is_scripting():
        return residual + F.linear(x, weight, bias)
    # autocast does not lower the precision of in-place matmuls
    if bias is None or x.is_meta or torch.compiler.is_compiling() or torch.is_autocast_enabled(x.device.type):
        return residual + F.linear(x, weight, bias)
    out = residual.flatten(0, -2) + bias
    return out.addmm_(x.flatten(0, -2), weight.t()).view_as(residual)


class RmsNorm(nn.Module):
    """x / (|x|_2 / sqrt(d) + eps), without parameters."""

    def __init__(self, eps: float = 1e-8):
        super().__init__()
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = torch.linalg.vector_norm(x, dim=-1, keepdim=True) / x.shape[-1] ** 0.5
        return x / (scale + self.eps)


class LocalConv(nn.Conv2d):
    """A depthwise convolution over the token grid, with zeros beyond the image; it starts as the identity."""

    def __init__(self, dim: int, kernel_size: int, device=None, dtype=None):
        super().__init__(
            dim, dim, kernel_size, padding=kernel_size // 2, groups=dim, bias=False, device=device, dtype=dtype
        )

    def reset_parameters(self) -> None:
        nn.init.dirac_(self.weight, groups=self.groups)

    def forward(self, x: torch.Tensor, grid: tuple[int, int], backend: str | None = None) -> torch.Tensor:
        """Tokens (B, H W, D) to tokens."""
        return local_conv(x, self.weight, grid, backend)


class Recurrence(NamedTuple):
    """The terms of h_t = decay_t exp(i theta_t) h_(t-1) + input_gate_t c_t, which a layer scans in every direction."""

    c: torch.Tensor  # real and imaginary parts, (B, T, 2, D)
    decay: torch.Tensor  # the forget gate, (B, T, D)
    input_gate: torch.Tensor  # 1 - decay, or 1 without an input gate or forget gate, (B, T, D)
    theta: torch.Tensor  # of each direction, (K, D), or of each token, (B, T, K, D)
    grid: tuple[int, int] | None  # (H, W) if rows and columns are scanned

    def angles(self, line: torch.Tensor, image: int) -> torch.Tensor:
        """The accumulated angle at each token of a scanned line, in the order of each direction, (K, T, D)."""
        theta = self.theta if self.theta.dim() == 2 else self.theta[image : image + 1, line]
        return turned_angles(theta, len(line))[:, 0]


class Hgru(nn.Module):
    """Hierarchically gated recurrent unit: a projection, a complex recurrence over tokens, a norm, a projection.

    Args:
        dim: width D.
        bidirectional: scan from both ends, with shared projections and one theta per direction.
        output_gate: multiply the states by a sigmoid gate before the norm.
        gate_after_norm: multiply by a SiLU gate after the norm instead, as the authors' released image models do.
        complex_state: False keeps theta at zero, so that real and imaginary parts never mix.
        scan: '1d' scans all tokens as one sequence; '2d' scans each row and each column of the image.
        local_conv: kernel size of a depthwise convolution over the token grid before the projection, 0 for none.
        proj_drop: dropout of the output.
        norm_layer: norm of the 2D states.
    """

    def __init__(
        self,
        dim: int,
        bidirectional: bool = True,
        output_gate: bool = True,
        gate_after_norm: bool = False,
        complex_state: bool = True,
        scan: str = "1d",
        local_conv: int = 0,
        proj_drop: float = 0.0,
        norm_layer: type[nn.Module] = nn.LayerNorm,
        device=None,
        dtype=None,
    ):
        super().__init__()
        check_choice("Hgru: scan", scan, SCANS)
        check_choice("Hgru: local_conv", local_conv, LOCAL_CONVS)
        dd = {"device": device, "dtype": dtype}
        self.dim = dim
        self.bidirectional = bidirectional
        self.output_gate = output_gate
        self.gate_after_norm = gate_after_norm
        self.scan = scan
        self.local_conv = LocalConv(dim, local_conv, **dd) if local_conv else None
        # rows [c_re | c_im | f | g_re | g_im]
        self.in_proj = DeferredBiasLinear(dim, (5 if output_gate else 3) * dim, **dd)
        theta = torch.empty(2 if bidirectional else 1, dim, **dd)
        if complex_state:
            self.theta = nn.Parameter(theta)
        else:
            self.register_buffer("theta", theta)
        self.norm = norm_layer(2 * dim, **dd)
        self.out_proj = ResidualLinear(2 * dim, dim, **dd)
        self.proj_drop = nn.Dropout(proj_drop)
        # a scripted or exported model consists of plain operations
        self.backend: str | None = "torch" if is_scriptable() or is_exportable() else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set theta to the angles of rotary embeddings (RoPE) in both directions, or to 0 if it is not learned."""
        with torch.no_grad():
            if isinstance(self.theta, nn.Parameter):
                j = torch.arange(self.dim, device=self.theta.device, dtype=torch.float64)
                self.theta.copy_((10000.0 ** (-2 * j / self.dim)).expand_as(self.theta))
            else:
                self.theta.zero_()

    def forward(
        self,
        x: torch.Tensor,
        lower_bound: torch.Tensor,
        residual: torch.Tensor | None = None,
        grid: tuple[int, int] | None = None,
    ) -> torch.Tensor:
        """Mix tokens.

        Args:
            x: tokens (B, T, D).
            lower_bound: this layer's lower bound, (D,), in float32 or float64.
            residual: added to the output, which then skips dropout.
            grid: (H, W) of the tokens, row by row; optional for a 1d scan without local convolution.
        """
        scanned = self.scanned_grid(x, grid)
        z = self.in_proj(self.mix_neighbours(x, grid))  # (B, T, 5D), without the bias
        bias = self.in_proj.bias.to(lower_bound.dtype)
        theta = self.theta.to(lower_bound.dtype)
        if self.gate_after_norm:
            split = 3 * self.dim
            h = hgru_scan(z[..., :split], lower_bound, theta, bias=bias[:split], backend=self.backend, grid=scanned)
            gate = F.silu(z[..., split:] + bias[split:].to(z.dtype))
            return self.drop(self.out_proj(self.norm(h) * gate, residual), residual)
        h = hgru_scan(z, lower_bound, theta, bias=bias, backend=self.backend, grid=scanned)
        return self.drop(self.project(h, residual), residual)

    def scanned_grid(self, x: torch.Tensor, grid: tuple[int, int] | None) -> tuple[int, int] | None:
        """The grid that the scan runs over, or None for one sequence."""
        if self.scan == "1d" and self.local_conv is None:
            return None
        if grid is None:
            raise ValueError(f"the mixer needs the grid of its {x.shape[1]} tokens, got None")
        if not torch.jit.is_scripting():
            check_grid(grid, x.shape[1])
        return grid if self.scan == "2d" else None

    def mix_neighbours(self, x: torch.Tensor, grid: tuple[int, int] | None) -> torch.Tensor:
        """Apply the local convolution, if there is one."""
        if self.local_conv is None or grid is None:
            return x
        return self.local_conv(x, grid, self.backend)

    def project(self, h: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        """Norm and output projection of the gated states (B, T, 2D)."""
        normed = self.norm(h)
        if torch.jit.is_scripting():
            return self.out_proj(normed, residual)
        with recomputed(normed, partial(self.norm.forward, h.detach())):
            return self.out_proj(normed, residual)

    def drop(self, x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        return self.proj_drop(x) if residual is None else x

    def recurrence(self, x: torch.Tensor, lower_bound: torch.Tensor, grid: tuple[int, int] | None = None) -> Recurrence:
        """The intermediate values of the scan, for analysis; arguments as for forward."""
        scanned = self.scanned_grid(x, grid)
        x = self.mix_neighbours(x, grid)
        z = self.in_proj(x).to(lower_bound.dtype) + self.in_proj.bias.to(lower_bound.dtype)
        c = F.silu(z[..., : 2 * self.dim]).unflatten(-1, (2, self.dim))
        return Recurrence(c, *self.gates(z, lower_bound), self.turns(x, lower_bound), scanned)

    def gates(self, z: torch.Tensor, lower_bound: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Decay and input gate, each (B, T, D)."""
        return forget_gate(z[..., 2 * self.dim : 3 * self.dim], lower_bound)

    def turns(self, x: torch.Tensor, lower_bound: torch.Tensor) -> torch.Tensor:
        """The rotation per step, the same for all tokens, (K, D), or one per token, (B, T, K, D)."""
        return self.theta.to(lower_bound.dtype)


class AblatedHgru(Hgru):
    """The HGRU without its input gate or forget gate, or with a theta that depends on the token (paper, section 4.3).

    Args:
        dim: width D.
        input_gate: False drops the factor 1 - decay of the input.
        forget_gate: 'bound_only' uses the lower bound as the decay; 'none' sets decay and input gate to 1.
        data_dependent_theta: the rotation at each step is a projection of its token.
        **kwargs: as in Hgru.
    """

    def __init__(
        self,
        dim: int,
        input_gate: bool = True,
        forget_gate: str = "full",
        data_dependent_theta: bool = False,
        device=None,
        dtype=None,
        **kwargs,
    ):
        dd = {"device": device, "dtype": dtype}
        super().__init__(dim, **kwargs, **dd)
        self.input_gate = input_gate
        self.forget_gate = forget_gate
        if forget_gate != "full":
            self.in_proj = DeferredBiasLinear(dim, self.in_proj.out_features - dim, **dd)  # no f rows
        self.theta_proj: nn.Linear | None = None
        if data_dependent_theta:
            self.theta_proj = nn.Linear(dim, self.theta.numel(), **dd)
            self.theta = None

    def reset_parameters(self) -> None:
        if self.theta is not None:
            super().reset_parameters()

    def forward(
        self,
        x: torch.Tensor,
        lower_bound: torch.Tensor,
        residual: torch.Tensor | None = None,
        grid: tuple[int, int] | None = None,
    ) -> torch.Tensor:
        D = self.dim
        scanned = self.scanned_grid(x, grid)
        x = self.mix_neighbours(x, grid)
        z = self.in_proj(x).to(lower_bound.dtype) + self.in_proj.bias.to(lower_bound.dtype)
        decay, input_gate = self.gates(z, lower_bound)
        c = F.silu(z[..., : 2 * D]).unflatten(-1, (2, D))
        h = scan_tokens(decay, input_gate.unsqueeze(-2) * c, self.turns(x, lower_bound), scanned).flatten(-2)
        if self.output_gate and not self.gate_after_norm:
            h = h * torch.sigmoid(z[..., -2 * D :])
        h = self.norm(h.to(x.dtype))
        if self.gate_after_norm:
            h = h * F.silu(z[..., -2 * D :]).to(x.dtype)
        return self.drop(self.out_proj(h, residual), residual)

    def gates(self, z: torch.Tensor, lower_bound: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        D = self.dim
        if self.forget_gate == "full":
            decay, input_gate = forget_gate(z[..., 2 * D : 3 * D], lower_bound)
        else:
            decay = lower_bound.expand_as(z[..., :D])
            if self.forget_gate == "none":
                decay = torch.ones_like(decay)
            input_gate = 1 - decay
        if self.forget_gate == "none" or not self.input_gate:
            input_gate = torch.ones_like(decay)
        return decay, input_gate

    def turns(self, x: torch.Tensor, lower_bound: torch.Tensor) -> torch.Tensor:
        if self.theta_proj is None:
            return self.theta.to(lower_bound.dtype)
        return self.theta_proj(x).to(lower_bound.dtype).unflatten(-1, (-1, self.dim))


class Glu(nn.Module):
    """Gated channel mixer fc2(act(a) * v) with [a | v] = fc1(x)."""

    def __init__(
        self,
        dim: int,
        hidden_dim: int,
        act_layer: type[nn.Module] = nn.SiLU,
        proj_drop: float = 0.0,
        device=None,
        dtype=None,
    ):
        super().__init__()
        dd = {"device": device, "dtype": dtype}
        self.fc1 = DeferredBiasLinear(dim, 2 * hidden_dim, **dd)
        self.act = act_layer()
        self.fc2 = ResidualLinear(hidden_dim, dim, **dd)
        self.proj_drop = nn.Dropout(proj_drop)
        self.fused = isinstance(self.act, nn.SiLU)
        self.backend: str | None = "torch" if is_scriptable() or is_exportable() else None

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """Mix the channels of x (B, T, D); a residual is added to the output, which then skips dropout."""
        z = self.fc1(x)  # (B, T, 2 * hidden), without the bias
        out = self.fc2(self.activate(z), residual) if torch.jit.is_scripting() else self.project(z, residual)
        return self.proj_drop(out) if residual is None else out

    def activate(self, z: torch.Tensor) -> torch.Tensor:
        if self.fused:
            return glu(z, self.fc1.bias, self.backend)
        a, v = (z + self.fc1.bias.to(z.dtype)).chunk(2, dim=-1)
        return self.act(a) * v

    @torch.jit.unused
    def project(self, z: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        hidden = self.activate(z)
        with recomputed(hidden, partial(self.activate, z.detach())):
            return self.fc2(hidden, residual)
