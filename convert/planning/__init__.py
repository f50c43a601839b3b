"""Plans: how much of a cache budget each layer gets."""
