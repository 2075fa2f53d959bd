"""Weights inside a vLLM worker: `worker_extension` receives and loads them, `fixes` repairs what vLLM gets wrong."""
