"""Third-party functions, a tracker and a callback (`small_parts.callback:NotesEvents`, chosen by its path)."""
