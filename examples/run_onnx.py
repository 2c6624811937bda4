"""Classify an image with an exported model, without torch: python run_onnx.py MODEL.onnx IMAGE"""

import json
import sys

import numpy as np
import onnxruntime
from PIL import Image, ImageOps

session = onnxruntime.InferenceSession(sys.argv[1])
about = {key: json.loads(value) for key, value in session.get_modelmeta().custom_metadata_map.items()}
image = ImageOps.exif_transpose(Image.open(sys.argv[2])).convert("RGB")
side = about["input_size"][-1]
sides = [n * int(side / about["crop_pct"]) // min(image.size) for n in image.size]
image = image.resize(sides, Image.Resampling[about["interpolation"].upper()])
left, top = (round((n - side) / 2) for n in image.size)
pixels = np.float32(image.crop((left, top, left + side, top + side))) / 255 - np.float32(about["mean"])
logits = session.run(None, {"images": (pixels / np.float32(about["std"])).transpose(2, 0, 1)[None]})[0][0]
print(about["class_names"][logits.argmax()], *logits)
