"""specdec: lossless speculative decoding for Gemma 4. Start reading at `specdec/cycle.py`."""

__version__ = "0.1.0"
