"""From the name of a loss to the function that a training backend calls."""

from __future__ import annotations

from rl_core.algorithms.objective import Objective
from rl_core.interfaces import LossSpec
from rl_core.plugins import load_function


def objective_from_spec(spec: LossSpec, *, key: str | None = None) -> Objective:
    """Loads a loss by entry point or `package.module:function`, checks its parameters, runs it on four tokens.

    Args:
        spec: what is minimised.
        key: the configuration key that chose the loss, for messages.

    Raises:
        PluginError: no such function, or one whose parameters or result are not those of a loss.
        ConfigError: an unknown or missing setting, or one out of range.
    """
    function = load_function("rl_core.policy_losses", spec.name, spec.params, key=key)
    objective = Objective(
        function, spec.params, kl_coef=spec.kl_coef, kl_estimator=spec.kl_estimator, entropy_coef=spec.entropy_coef
    )
    objective.try_out()
    return objective
