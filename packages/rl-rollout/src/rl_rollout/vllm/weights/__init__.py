"""Receives weights inside a vLLM worker: `worker_extension` loads them into the model, or as an adapter through
`adapters`."""
