"""Run an exported file without this package: python run_exported.py FORMAT FILE INPUTS.npz OUTPUTS.npz."""

import sys

import numpy as np


def load(kind: str, path: str):
    """A function from images to logits, both NumPy arrays."""
    if kind == "onnx":
        import onnxruntime

        session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
        name = session.get_inputs()[0].name
        return lambda images: session.run(None, {name: images})[0]

    import torch

    model = torch.jit.load(path).eval() if kind == "torchscript" else torch.export.load(path).module()

    @torch.no_grad()
    def run(images: np.ndarray) -> np.ndarray:
        return model(torch.from_numpy(images)).numpy()

    return run


def main() -> None:
    """Run the model on every array of images in INPUTS.npz, and save the logits under the same names in OUTPUTS.npz."""
    kind, path, inputs, outputs = sys.argv[1:]
    # make importing any of these fail, as if it were not installed
    sys.modules.update(dict.fromkeys(["hgrn_vision", "timm"] + ["torch"] * (kind == "onnx")))
    run = load(kind, path)
    with np.load(inputs) as arrays:
        np.savez(outputs, **{name: run(arrays[name]) for name in arrays.files})


if __name__ == "__main__":
    main()
