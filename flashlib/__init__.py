"""FlashAttention, step by step: the finished implementations that the notebooks import.

Importing the package imports neither PyTorch nor Triton: modules are fetched when they are first asked for. What it
does is settle how Triton will run kernels, because that is fixed when Triton is imported: see `flashlib.device.settle`.
"""

import importlib
from pathlib import Path

from flashlib import device

__version__ = "0.1.0"

# Public names that live in a module, fetched with it on first use.
_HOME = {
    "report": "device",
    "flash_attention": "attention",
    "flash_attention_varlen": "varlen",
    "flash_decode": "decode",
    "scaled_dot_product_attention": "sdpa",
}

device.settle()


def __getattr__(name):
    if name in _HOME:
        return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    if name in _modules():
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__():
    return sorted({*globals(), *_HOME, *_modules()})


def _modules():
    folder = Path(__file__).parent
    found = {path.stem for path in folder.glob("*.py")} | {path.parent.name for path in folder.glob("*/__init__.py")}
    return {name for name in found if not name.startswith("_")}
