"""Translates commands and configurations of other trainers."""
