"""Operators of ONNX that PyTorch's exporter does not use by itself."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from onnx_ir import Model

OPSET = 23  # the first with RotaryEmbedding


def fuse_rotations(model: "Model") -> None:
    """Replace each rotation of complex numbers, eight operators, by the one that reads and writes memory once."""
    from onnxscript.rewriter import pattern, rewrite

    rewrite(model, [pattern.RewriteRule(_rotation, _rotary_embedding, _is_rotation)])


def _rotation(op, re, im, cos, sin):
    """What kernels/torch_scan.py writes for [Re | Im] (1, M, T, 2D), which is split, and tables (1, T, D)."""
    return op.Concat(op.Sub(re * cos, im * sin), op.Add(re * sin, im * cos), axis=-1)


def _is_rotation(context, re, im, cos, sin) -> bool:
    """Whether the parts are halves of one tensor, and the tables those of its tokens."""
    split = re.producer()
    if split is None or split.op_type != "Split" or list(split.outputs) != [re, im]:
        return False
    return all(v.shape is not None and v.shape.rank() == rank for v, rank in ((re, 4), (cos, 3), (sin, 3)))


def _rotary_embedding(op, re, im, cos, sin):
    return op.RotaryEmbedding(re.producer().inputs[0], cos, sin)
