"""specdec: lossless speculative decoding for Gemma 4. Start reading at `specdec/core/cycle.py`."""

from specdec.core.version import VERSION as __version__

__all__ = ["__version__"]
