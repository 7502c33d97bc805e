"""torchvision of the registry beside a CPU build of torch, for the tests of videos.

Its operators are compiled for CUDA and do not load. They are not used for videos, but must be known
when it is imported. So this package, which comes first in PYTHONPATH, defines them and becomes the
one behind it.
"""

import sys
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

import torch

_FOLDER = str(Path(__file__).parents[1])
_DIFFERENTIABLE = ("roi_align", "roi_pool", "ps_roi_align", "ps_roi_pool", "deform_conv2d")
_library: Any = torch.library
_OPERATORS = _library.Library("torchvision", "DEF")
for _name in (*_DIFFERENTIABLE, *(f"_{name}_backward" for name in _DIFFERENTIABLE)):
    _OPERATORS.define(f"{_name}(Tensor input) -> Tensor")
for _name in ("nms", "qnms", "qroi_align"):
    _OPERATORS.define(f"{_name}(Tensor input) -> Tensor")

_spec = PathFinder.find_spec("torchvision", [path for path in sys.path if path != _FOLDER])
assert _spec
assert _spec.origin
__file__, __path__ = _spec.origin, list(_spec.submodule_search_locations or ())
exec(compile(Path(__file__).read_text(), __file__, "exec"))
