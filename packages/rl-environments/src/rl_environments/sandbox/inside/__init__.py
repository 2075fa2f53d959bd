"""Supervises the untrusted program, from within the sandbox. The interpreter there may be another Python (3.8 or later)
with only the standard library, so these modules import nothing else."""
