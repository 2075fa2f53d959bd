"""Changes to Megatron-Core and Megatron-Bridge, one file per library, and to torch if there is no GPU."""
