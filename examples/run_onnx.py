"""Classify an image with an exported model, without torch: python run_onnx.py MODEL.onnx IMAGE"""

import json
import sys

import numpy as np
import onnxruntime
from PIL import Image, ImageOps

session = onnxruntime.InferenceSession(sys.argv[1])
about = {key: json.loads(value) for key, value in session.get_modelmeta().custom_metadata_map.items()}
channels, _, side = about["input_size"]
image = ImageOps.exif_transpose(Image.open(sys.argv[2])).convert("RGB")
sides = [n * int(side / about["crop_pct"]) // min(image.size) for n in image.size]
image = image.resize(sides, Image.Resampling[about["interpolation"].upper()])
left, top = (round((n - side) / 2) for n in image.size)
image = image.crop((left, top, left + side, top + side)).convert("L" if channels == 1 else "RGB")
pixels = np.float32(image).reshape(side, side, channels) / 255
pixels = (pixels - np.float32(about["mean"])) / np.float32(about["std"])
logits = session.run(None, {session.get_inputs()[0].name: pixels.transpose(2, 0, 1)[None]})[0][0]
print(about["class_names"][logits.argmax()], *logits)
