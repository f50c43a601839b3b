"""kvfold: fold the keys and values of pretrained transformers into one tensor."""

from kvfold import model as _model  # noqa: F401  (registers the folded classes with transformers)

__version__ = "0.1.0"
