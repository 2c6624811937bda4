"""The residual block, run layer by layer or, where that gives the same result, as one kernel."""

import torch
from timm.layers import DropPath, register_notrace_module
from torch import nn
from torch.nn.modules import module

from .backend import backend_for, has_kernels, kernels, needs_dispatcher
from .layers import DeferredBiasLinear, Glu, Hgru, LocalConv, ResidualLinear


# symbolic tracing treats a block as one step, so that a traced model computes exactly what the model does
@register_notrace_module
class Block(nn.Module):
    """Pre-norm residual block: mix tokens, then mix channels."""

    def __init__(
        self, mixer: Hgru, mlp_ratio: float, proj_drop: float, drop_path: float, norm_layer, act_layer, device, dtype
    ):
        super().__init__()
        dd = {"device": device, "dtype": dtype}
        dim = mixer.dim
        self.norm1 = norm_layer(dim, **dd)
        self.mixer = mixer
        self.norm2 = norm_layer(dim, **dd)
        self.mlp = Glu(dim, int(dim * mlp_ratio), act_layer=act_layer, proj_drop=proj_drop, **dd)
        self.drop_path = DropPath(drop_path) if drop_path > 0 else nn.Identity()
        self.drops = proj_drop > 0 or drop_path > 0

    def forward(self, x: torch.Tensor, lower_bound: torch.Tensor, grid: tuple[int, int] | None = None) -> torch.Tensor:
        """Tokens (B, T, D) to tokens; lower_bound (D,) and grid as for the mixer."""
        # not self.training: dropout layers may be left on in evaluation, to sample from a model
        if self.drops and (self.drop_path.training or self.mixer.proj_drop.training or self.mlp.proj_drop.training):
            x = x + self.drop_path(self.mixer(self.norm1(x), lower_bound, grid=grid))
            return x + self.drop_path(self.mlp(self.norm2(x)))
        if not torch.jit.is_scripting():
            out = self.fused_forward(x, lower_bound, grid)
            if out is not None:
                return out
        # the same sums; the last matmul of each branch accumulates into the residual
        x = self.mixer(self.norm1(x), lower_bound, x, grid)
        return self.mlp(self.norm2(x), x)

    @torch.jit.unused
    def fused_forward(
        self, x: torch.Tensor, lower_bound: torch.Tensor, grid: tuple[int, int] | None
    ) -> torch.Tensor | None:
        """The output from a kernel for the whole block, or None where the layers must run one by one."""
        if torch.compiler.is_compiling() or isinstance(x, torch.fx.Proxy) or needs_dispatcher(x):
            return None
        if x.dim() != 3 or torch.is_autocast_enabled(x.device.type):
            return None
        backend = backend_for(x, self.mixer.backend)
        if not has_kernels(backend, "block"):
            return None
        kernel = kernels(backend, "block")
        if not kernel.is_faster(x) or not self.is_plain():
            return None
        weights = kernel.weights_of(self, lower_bound)
        if any(weight is None or weight.device != x.device for weight in weights.values()):
            return None
        if needs_dispatcher(*weights.values()) or not kernel.fits(x, weights):
            return None
        rows_and_columns = self.mixer.scanned_grid(x, grid) is not None
        conv = None if self.mixer.local_conv is None else self.mixer.local_conv.weight
        if conv is not None and (conv.dtype != x.dtype or conv.device != x.device or needs_dispatcher(conv)):
            return None
        eps = self.norm1.eps, self.mixer.norm.eps, self.norm2.eps
        return kernel.forward(x, weights, eps, grid, rows_and_columns, conv)

    def is_plain(self) -> bool:
        """Whether the block has the standard layers, without hooks or replaced forward methods."""
        mixer, mlp = self.mixer, self.mlp
        if mixer.local_conv is not None and type(mixer.local_conv) is not LocalConv:
            return False
        if type(mixer) is not Hgru or type(mlp) is not Glu or not mixer.output_gate or mixer.gate_after_norm:
            return False
        norms = self.norm1, mixer.norm, self.norm2
        linears = mixer.in_proj, mixer.out_proj, mlp.fc1, mlp.fc2
        if {type(norm) for norm in norms} != {nn.LayerNorm} or type(mlp.act) is not nn.SiLU:
            return False
        if [type(linear) for linear in linears] != [DeferredBiasLinear, ResidualLinear] * 2:
            return False
        layers = [mixer, mlp, *norms, *linears, mlp.act, mixer.proj_drop, mlp.proj_drop]
        if mixer.local_conv is not None:
            layers.append(mixer.local_conv)
        global_hooks = module._global_forward_hooks or module._global_forward_pre_hooks
        # a wrapper may have replaced the forward of an instance
        return not global_hooks and not any(
            layer._forward_hooks or layer._forward_pre_hooks or "forward" in vars(layer) for layer in layers
        )
