"""Checks that refuse models, settings and meshes before any rank starts. No module here imports torch."""
