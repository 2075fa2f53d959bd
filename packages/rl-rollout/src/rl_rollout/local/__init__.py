"""The engine in the trainer's own process.

`plugin` is the entry point, `engine` the asynchronous client; they build on `scheduler`, `rows` and `sampling`.
"""
