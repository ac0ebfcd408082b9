"""Plan pipeline-parallel training in Rust, run it in PyTorch."""

from pipeloom._core import __version__

__all__ = ["__version__"]
