"""Weights inside a vLLM worker: `worker_extension` receives and loads them."""
