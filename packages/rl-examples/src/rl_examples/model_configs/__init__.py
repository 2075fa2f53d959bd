"""The fields of public models' `config.json`, without weights: sizes are known where no network is.

One directory for each name, `<organisation>/<model>/config.json`. `rl plan` and dry runs find them by the entry point
`rl_core.model_configs`; a run takes the model's own file, which it fetches together with the weights.
"""

from __future__ import annotations

from pathlib import Path

directory = Path(__file__).parent
