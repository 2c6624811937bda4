"""What a result may depend on besides the settings: versions, commit, GPU."""

import platform
import subprocess
from importlib import metadata
from pathlib import Path

import torch

from ..version import __version__


def versions() -> dict[str, str]:
    """Versions by package, the commit of this code, and the GPU if there is one."""
    found = {"hgrn_vision": __version__, "python": platform.python_version()}
    for name in ("torch", "timm", "torchvision", "pillow", "numpy"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    found["commit"] = _commit()
    if torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name()
    return found


def _commit() -> str:
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
