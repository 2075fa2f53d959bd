"""A third-party environment: `digit_game.environment`."""
