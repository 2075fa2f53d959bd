"""A third-party engine, generator and command: `engine`, `generator` and `command` are their entry points."""
