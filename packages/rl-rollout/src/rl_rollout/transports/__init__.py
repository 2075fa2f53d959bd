"""Weight transports. Each has a module of its name; the streaming ones also have a module `<name>_ends`."""
