"""Supervises the untrusted program. The programs' interpreter runs these modules. It may be another Python (3.8 or
later) without any packages, so the modules import only the standard library."""
