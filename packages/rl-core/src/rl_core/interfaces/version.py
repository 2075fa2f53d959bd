"""The contracts' version, which a plug-in states as `contract_version`."""

CONTRACT_VERSION = 1
"""Raised when a contract of this package changes in a way that existing plug-ins would not survive."""
ENGINE_CONTRACT_VERSION = 2
"""Of `InferencePlugin`. Engines of version 1 were given the whole configuration; they go on through an adapter."""
GENERATOR_CONTRACT_VERSION = 2
"""Of `GeneratorPlugin`. A generator of version 1 is a function of the whole configuration; it goes on through an
adapter."""
