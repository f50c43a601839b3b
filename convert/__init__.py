"""Checkpoint in, folded checkpoint out."""
