"""A third-party training backend: `plain_ddp.backend` is its entry point, `plain_ddp.worker` one of its ranks."""
