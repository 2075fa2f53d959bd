"""Patches Megatron-Core and Megatron-Bridge, with one file per library, and torch if there is no GPU."""
