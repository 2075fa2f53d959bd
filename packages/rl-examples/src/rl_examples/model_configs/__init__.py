"""Contains the `config.json` of public models, without weights, so that model sizes are known without network access.

Each model has a directory: `<organisation>/<model>/config.json`. `rl plan` and dry runs find this directory
through the entry point `rl_core.model_configs`; a run uses the `config.json` that it fetches with the model's weights.
"""

from __future__ import annotations

from pathlib import Path

directory = Path(__file__).parent
