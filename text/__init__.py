"""Text: its sources, mixtures of them, text that models generate, and packed shards of tokens."""
