"""Training: uptraining of converted models and training from scratch."""

from pathlib import Path

ACCELERATE = Path(__file__).parent / "accelerate"
"""Folder with configs for ``accelerate launch``: ``ddp.yaml`` and ``fsdp2.yaml``."""
