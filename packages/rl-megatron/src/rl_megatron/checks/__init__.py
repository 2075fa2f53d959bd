"""What is refused before a rank is started: models, settings and meshes. No module here imports torch."""
