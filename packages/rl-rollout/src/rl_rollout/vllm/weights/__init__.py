"""Weights inside a vLLM worker: `worker_extension` receives and loads them, an adapter that comes alone by `adapters`;
`fixes` repairs what vLLM gets wrong."""
