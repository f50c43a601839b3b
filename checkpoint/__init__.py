"""Checkpoints: folders, Hub ids and GGUF files, read lazily, written atomically, with their record ``kvfold.json``."""
