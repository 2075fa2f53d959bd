"""Builds this rank's part of a Megatron model from a Hugging Face model, exports weights and computes scores."""
