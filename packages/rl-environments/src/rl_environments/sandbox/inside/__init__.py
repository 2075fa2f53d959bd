"""What runs beside the untrusted program: its supervisor. Run by the sandbox's interpreter, which may be another Python
(3.8 or later), with the standard library alone."""
