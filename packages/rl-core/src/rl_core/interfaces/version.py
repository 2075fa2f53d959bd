"""The contracts' version, which a plug-in states as `contract_version`."""

CONTRACT_VERSION = 1
"""Raised when a contract of this package changes in a way that existing plug-ins would not survive."""
