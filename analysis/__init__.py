"""Read-only questions about a model: redundancy of keys and values, perplexity, cache bytes, reports."""
