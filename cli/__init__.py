"""The door: the ``kvfold`` command. Parses, calls one function of a room, prints."""

from .app import app, main

__all__ = ["app", "main"]
