"""Weights inside a vLLM worker: `worker_extension` receives them and loads a model or, through `adapters`, an
adapter."""
