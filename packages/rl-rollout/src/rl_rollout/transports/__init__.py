"""Weight transports, one module each."""
