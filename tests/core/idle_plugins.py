"""One complete plug-in of each kind, for tests of how plug-ins are chosen; none of them ever runs."""

from __future__ import annotations

import attrs
from torch import Tensor

from rl_core import interfaces
from rl_core.algorithms import TokenLoss
from rl_core.errors import ConfigError
from rl_core.interfaces import Callback, Recipe


class Backend(interfaces.Backend):
    """A `Backend` that trains nothing."""

    name = "idle"
    config_section = "idle_config"
    options_class = dict

    def mesh(self, options, world_size):
        raise AssertionError("an idle plug-in must not train")

    def validate(self, spec, world_size):
        pass

    def needs_own_process(self):
        return False

    def create_worker(self, spec, rank):
        raise AssertionError("an idle plug-in must not train")


class Worker(interfaces.Worker):
    """A `Worker` without a model."""

    def forward(self, batch, plan, *, temperature, returns=None):
        raise AssertionError("an idle plug-in must not train")

    def forward_backward(self, batch, plan, loss, *, temperature, returns=()):
        raise AssertionError("an idle plug-in must not train")

    def optim_step(self, update=None):
        raise AssertionError("an idle plug-in must not train")

    def export_weights(self, max_bucket_bytes):
        raise AssertionError("an idle plug-in must not send weights")

    def save_state(self, directory):
        raise AssertionError("an idle plug-in must not save")

    def load_state(self, directory):
        raise AssertionError("an idle plug-in must not load")

    def save_model(self, directory):
        raise AssertionError("an idle plug-in must not save")


@attrs.frozen
class NoOptions:
    """Options of a backend that has none."""


class OptionlessBackend(Backend):
    options_class = NoOptions


class Engine(interfaces.EnginePlugin):
    """Starts nothing."""

    name = "idle"

    async def create(self, spec):
        raise AssertionError("an idle plug-in must not start engines")


class FussyEngine(Engine):
    def validate(self, spec):
        if spec.sampling.stop:
            raise ConfigError("this engine knows no stop strings", key="generator.sampling_params")


class Transport(interfaces.WeightTransport):
    """Sends nothing."""

    name = "idle"
    is_staged = True

    def open(self, *, num_ranks, num_engines):
        raise AssertionError("an idle plug-in must not send weights")

    def sender(self, rendezvous, rank, world_size):
        raise AssertionError("an idle plug-in must not send weights")

    def close(self, rendezvous):
        pass


class Generator(interfaces.Generator):
    """Plays no episodes."""

    def prompt_length(self, row):
        return 1

    async def generate(self, request):
        raise AssertionError("an idle plug-in must not play episodes")


class GeneratorPlugin(interfaces.GeneratorPlugin):
    """Creates a generator that plays no episodes."""

    name = "idle"

    def create(self, spec, client):
        return Generator()


class Environment(interfaces.Environment):
    def __init__(self, row, options):
        pass

    async def reset(self):
        raise AssertionError("an idle plug-in must not play episodes")

    async def step(self, action):
        raise AssertionError("an idle plug-in must not play episodes")


class Tracker(interfaces.Tracker):
    def __init__(self, config, run_dir, *, total_steps, first_step):
        pass

    def log(self, step, metrics):
        pass

    def close(self):
        pass


class Event(Callback):
    def on_step_end(self, step, metrics):
        pass


def loss(logprobs_T, advantages_T, mask_T) -> TokenLoss:
    raise AssertionError("an idle plug-in must not train")


def advantages(scores_N, group_N, *, scale=1.0) -> Tensor:
    raise AssertionError("an idle plug-in must not train")


backend = Backend()
optionless = OptionlessBackend()
engine = Engine()
fussy_engine = FussyEngine()
transport = Transport()
generator = GeneratorPlugin()
recipe = Recipe(summary="idle", config={})
