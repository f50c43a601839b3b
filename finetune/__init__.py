"""Training: uptraining of converted models and training from scratch."""
