"""A Hugging Face model as this rank's part of a Megatron model: its layers, its weights, its scores."""
