"""Environments with tools, search, code and mathematics, and the sandbox that runs untrusted code."""

__all__: list[str] = []
