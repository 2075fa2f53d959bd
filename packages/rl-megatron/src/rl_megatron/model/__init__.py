"""Builds this rank's part of a Megatron model from a Hugging Face model, exports its weights and computes its
scores."""
