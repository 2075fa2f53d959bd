"""Weight transports. Each transport has a module of its name; a streaming transport also has a module `<name>_ends`."""
