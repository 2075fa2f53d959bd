"""Patches Megatron-Core (`fixes_megatron`), Megatron-Bridge (`fixes_bridge`) and, without a GPU, torch (`platform`)."""
