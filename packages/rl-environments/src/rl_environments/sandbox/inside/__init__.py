"""Supervises the untrusted program. The programs' interpreter, which may be another Python (3.8 or later) with only the
standard library, runs these modules, so they import nothing else."""
