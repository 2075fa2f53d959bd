"""Code that runs next to the untrusted program: its supervisor. The sandbox's interpreter, which runs this code, may be
another Python (3.8 or later) with only the standard library."""
