"""``python -m kvfold.cli``, which is also what torchrun starts."""

from .app import main

main()
