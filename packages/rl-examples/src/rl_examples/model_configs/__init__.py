"""The fields of public models' `config.json`, without weights, so that model sizes are known without a network.

One directory per name: `<organisation>/<model>/config.json`. `rl plan` and dry runs find them by the entry point
`rl_core.model_configs`; a run uses the model's own file, which it fetches with the weights.
"""

from __future__ import annotations

from pathlib import Path

directory = Path(__file__).parent
