"""Methods that fold the keys and values of a layer, and the key windows that they read."""
