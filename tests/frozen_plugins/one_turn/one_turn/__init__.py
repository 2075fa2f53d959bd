"""A third-party generator: `one_turn.generator`."""
