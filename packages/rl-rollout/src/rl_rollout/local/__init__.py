"""Runs an inference engine in the trainer's own process.

`plugin` is the entry point, and `engine` implements `InferenceClient`. `scheduler` decides which samples run, `rows`
runs the model for them, and `sampling` draws their tokens.
"""
