"""DeiT-shaped vision backbones whose token mixer is a gated linear recurrence (HGRN, arXiv 2311.04823), for timm."""

from pathlib import Path

# setup.cfg installs kernels/ as hgrn_vision.kernels; in a checkout it is the sibling directory
_root = Path(__file__).resolve().parent.parent
if (_root / "kernels" / "triton_scan.py").exists():
    __path__.append(str(_root))

from .backend import set_backend  # noqa: E402
from .hgrn import HgrnDeit  # noqa: E402
from .pyramid import HgrnPyramid  # noqa: E402
from .scan import hgru_scan  # noqa: E402
from .version import __version__  # noqa: E402
from .weights import load_checkpoint  # noqa: E402

__all__ = ["HgrnDeit", "HgrnPyramid", "__version__", "hgru_scan", "load_checkpoint", "set_backend"]
