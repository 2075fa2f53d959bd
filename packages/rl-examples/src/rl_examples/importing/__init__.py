"""Commands and configurations of other trainers, translated."""
