"""A third-party inference engine: `naive_engine.plugin` is its entry point, `naive_engine.engine` the engine itself."""
