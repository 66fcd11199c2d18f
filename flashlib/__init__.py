"""FlashAttention, step by step: the finished implementations that the notebooks import."""

__version__ = "0.1.0"
