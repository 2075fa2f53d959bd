"""A third-party weight transport: `drop_box.transport` has both ends."""
