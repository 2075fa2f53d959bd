"""What is changed in Megatron-Core and Megatron-Bridge, a file per library, and in torch where there is no GPU."""
