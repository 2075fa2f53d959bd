"""A plug-in chosen by name is of the right kind, or one error says what is wrong."""

from __future__ import annotations

import abc
import itertools
import re
from typing import Any

import pytest

from rl_core import plugins
from rl_core.errors import PluginError
from rl_core.interfaces import Backend, Callback, Environment, Tracker
from rl_core.seams import RECEIVER, SEAMS
from rl_core.testing.reference_transport import MemoryReceiver
from tests.core import idle_plugins

HERE = __name__
IdleGenerator = idle_plugins.Generator
IDLE = "tests.core.idle_plugins"
RIGHT = {
    "rl_core.backends": ["backend"],
    "rl_core.inference": ["engine", "fussy_engine"],
    "rl_core.weight_transports": ["transport"],
    "rl_core.generators": ["generator"],
    "rl_core.environments": ["Environment"],
    "rl_core.advantage_estimators": ["advantages"],
    "rl_core.policy_losses": ["loss"],
    "rl_core.trackers": ["Tracker"],
    "rl_core.callbacks": ["Event"],
    "rl_core.recipes": ["recipe"],
}
"""Objects of `idle_plugins` by the seam that each was written for."""


# --- wrong kinds ----------------------------------------------------------------------------------------------------


class AbstractEnvironment(idle_plugins.Environment, abc.ABC):
    @abc.abstractmethod
    def judge(self): ...


class AnswersToEveryName:
    """Has every attribute; none has a correct value."""

    def __getattr__(self, name):
        return object()


class TakesRow(Environment):
    """An environment whose constructor takes only the row."""

    def __init__(self, row):
        pass

    async def reset(self): ...

    async def step(self, action): ...


class StepsWithoutAction(idle_plugins.Environment):
    async def step(self): ...


class ResetIsText(idle_plugins.Environment):
    reset = "12+34="


class OnlyResets:
    """Does not inherit the contract, as a user's class need not."""

    def __init__(self, row, options): ...

    async def reset(self): ...


class HidesItsTools(idle_plugins.Environment):
    async def tools(self): ...


class HidesItsGrammar(idle_plugins.Environment):
    async def structural_tag(self, example_call): ...


class NamelessBackend(idle_plugins.Backend):
    name = None


class BackendThatCreatesForOne(idle_plugins.Backend):
    def create_worker(self, spec): ...


class BackendWhoseMeshIsAsync(idle_plugins.Backend):
    async def mesh(self, options, world_size): ...


class MeshIsANumber(idle_plugins.Backend):
    mesh = 3


class SectionlessBackend(Backend):
    name = "sectionless"
    options_class = dict
    mesh = idle_plugins.Backend.mesh
    validate = idle_plugins.Backend.validate
    needs_own_process = idle_plugins.Backend.needs_own_process
    create_worker = idle_plugins.Backend.create_worker


class SecretPlanner(idle_plugins.Backend):
    def plan(self, spec, world_size, *, micro_batch_tokens, num_micro_batches): ...


class BoastfulBackend(idle_plugins.Backend):
    can_rehearse = True


class OpensByPosition(idle_plugins.Transport):
    def open(self, num_ranks, engines): ...


class ForgetsTheFirstStep(idle_plugins.Tracker):
    def __init__(self, config, run_dir, *, total_steps): ...


class LogsNothing(Tracker):
    pass


class NoTracker:
    def log(self, step, metrics): ...


class WantsArguments(Callback):
    def __init__(self, folder): ...


class HearsNoMetrics(Callback):
    def on_step_end(self, step): ...


class NoCallback:
    def on_step_end(self, step, metrics): ...


class AsyncGenerator(idle_plugins.GeneratorPlugin):
    async def create(self, spec, client): ...


def make_generator(row, options) -> IdleGenerator: ...


def scaled(scores_N, scale): ...


def clock(): ...


lookalike, async_generator = AnswersToEveryName(), AsyncGenerator()
wrong_environment = idle_plugins.Environment({}, {})
nameless_backend, one_rank_backend = NamelessBackend(), BackendThatCreatesForOne()
async_backend, number_backend = BackendWhoseMeshIsAsync(), MeshIsANumber()
sectionless_backend, secret_planner, boastful_backend = SectionlessBackend(), SecretPlanner(), BoastfulBackend()
opens_by_position = OpensByPosition()
WRONG = [
    (
        "rl_core.backends",
        "math:sqrt",
        "the function sqrt does not inherit rl_core.interfaces.Backend",
    ),
    (
        "rl_core.backends",
        f"{IDLE}:transport",
        "type Transport does not inherit rl_core.interfaces.Backend",
    ),
    ("rl_core.backends", f"{HERE}:sectionless_backend", "an object of type SectionlessBackend has no config_section"),
    ("rl_core.backends", f"{HERE}:secret_planner", "it defines plan, but its can_plan is false"),
    ("rl_core.backends", f"{HERE}:boastful_backend", "its can_rehearse is true, but it does not define rehearse"),
    ("rl_core.backends", f"{IDLE}:Backend", "it is the class Backend, not an instance of it"),
    ("rl_core.backends", f"{HERE}:nameless_backend", "its name is None, expected str"),
    (
        "rl_core.backends",
        f"{HERE}:one_rank_backend",
        "(spec) cannot be called as create_worker(spec, rank)",
    ),
    ("rl_core.backends", f"{HERE}:async_backend", "mesh is `async`, but it is called without `await`"),
    (
        "rl_core.backends",
        f"{HERE}:lookalike",
        "an object of type AnswersToEveryName does not inherit",
    ),
    ("rl_core.environments", f"{HERE}:lookalike", "it is an object of type AnswersToEveryName"),
    ("rl_core.environments", f"{HERE}:AbstractEnvironment", "the class AbstractEnvironment has no judge"),
    ("rl_core.backends", f"{HERE}:number_backend", "its mesh is 3, expected a method"),
    ("rl_core.inference", "os:path", "an object of type module does not inherit rl_core.interfaces.EnginePlugin."),
    (
        "rl_core.weight_transports",
        f"{HERE}:opens_by_position",
        "cannot be called as open(num_ranks=…, num_engines=…): missing a required argument: 'engines'",
    ),
    ("rl_core.generators", f"{HERE}:async_generator", "create is `async`, but it is called without `await`"),
    ("rl_core.generators", "math:sqrt", "the function sqrt does not inherit rl_core.interfaces.GeneratorPlugin."),
    ("rl_core.environments", "math:sqrt", "it is the function sqrt"),
    ("rl_core.environments", "math:pi", "it is an object of type float"),
    ("rl_core.environments", f"{HERE}:wrong_environment", "it is an object of type Environment"),
    ("rl_core.environments", "builtins:bool", "the class bool cannot inherit rl_core.interfaces.Environment: "),
    ("rl_core.environments", f"{HERE}:TakesRow", "TakesRow(row) cannot be called as TakesRow(row, options)"),
    ("rl_core.environments", f"{HERE}:StepsWithoutAction", "step() cannot be called as step(action)"),
    ("rl_core.environments", f"{HERE}:ResetIsText", "its reset is '12+34=', expected a method"),
    ("rl_core.environments", "rl_core.interfaces:Environment", "the class Environment has no reset, step"),
    ("rl_core.environments", f"{IDLE}:Tracker", "the class Tracker has no reset, step"),
    ("rl_core.environments", f"{HERE}:OnlyResets", "the class OnlyResets has no step"),
    ("rl_core.environments", f"{HERE}:HidesItsTools", "it defines tools, but its offers_tools is false"),
    ("rl_core.environments", f"{HERE}:HidesItsGrammar", "set forces_responses = True"),
    ("rl_core.trackers", "math:sqrt", "it is the function sqrt"),
    ("rl_core.trackers", f"{HERE}:NoTracker", "the class NoTracker does not inherit rl_core.interfaces.Tracker"),
    ("rl_core.trackers", f"{HERE}:LogsNothing", "the class LogsNothing has no log"),
    ("rl_core.trackers", f"{HERE}:ForgetsTheFirstStep", "got an unexpected keyword argument 'first_step'"),
    ("rl_core.callbacks", "math:sqrt", "it is the function sqrt"),
    ("rl_core.callbacks", f"{HERE}:NoCallback", "the class NoCallback does not inherit rl_core.interfaces.Callback"),
    (
        "rl_core.callbacks",
        f"{HERE}:WantsArguments",
        "(folder) cannot be called as WantsArguments(): missing",
    ),
    ("rl_core.callbacks", f"{HERE}:HearsNoMetrics", "on_step_end(step) cannot be called as on_step_end(step, metrics)"),
    ("rl_core.policy_losses", "math:sqrt", "sqrt: parameter x cannot be passed by name"),
    ("rl_core.policy_losses", "builtins:max", "the parameters of the function max cannot be inspected"),
    ("rl_core.policy_losses", f"{IDLE}:Environment", "it is the class Environment"),
    ("rl_core.policy_losses", f"{HERE}:clock", "the function clock has no positional parameter, so it reads no column"),
    (
        "rl_core.advantage_estimators",
        "math:sqrt",
        "it has the parameter 'x'; an estimator reads scores_N, group_N, ",
    ),
    ("rl_core.advantage_estimators", f"{HERE}:scaled", "A setting must be keyword-only: put it after `*`"),
    ("rl_core.advantage_estimators", "math:pi", "it is an object of type float"),
    ("rl_core.recipes", "math:sqrt", "it is the function sqrt"),
]


@pytest.mark.parametrize(("group", "path", "problem"), WRONG)
def test_the_error_about_an_unfit_plug_in_states_key_problem_and_expectation(group: str, path: str, problem: str):
    with pytest.raises(PluginError) as refusal:
        plugins.load(group, path, key="some.key")
    message = str(refusal.value)
    assert message.startswith(f"some.key: {path!r} is not {SEAMS[group].singular}: ")
    assert problem in message
    assert message.endswith(f". Expected {SEAMS[group].expected}")


@pytest.mark.parametrize(("group", "name"), [(group, name) for group, names in RIGHT.items() for name in names])
def test_fit_plug_ins_are_loaded(group: str, name: str):
    assert plugins.load(group, f"{IDLE}:{name}", key="some.key") is getattr(idle_plugins, name)


@pytest.mark.parametrize(
    ("seam", "group", "name"),
    [
        (seam, group, name)
        for seam, group in itertools.permutations(RIGHT, 2)
        for name in RIGHT[group]
        # A callable without parameters may be a function that returns a recipe; `load` checks its result.
        if (seam, name) != ("rl_core.recipes", "Event")
    ],
)
def test_a_plug_in_of_another_seam_is_refused(seam: str, group: str, name: str):
    with pytest.raises(PluginError, match=f"^some.key: '{IDLE}:{name}' is not {SEAMS[seam].singular}: "):
        plugins.load(seam, f"{IDLE}:{name}", key="some.key")


class Plain:
    """An environment that inherits nothing, with a list that has the name of a method of the contract."""

    def __init__(self, row, options):
        self.row, self.tools = row, ["saw"]

    async def reset(self):
        return self.row["prompt"]

    async def step(self, action): ...

    async def close(self): ...


async def test_an_environment_that_inherits_nothing_gets_the_defaults_of_the_contract():
    adapted = plugins.load("rl_core.environments", f"{HERE}:Plain")
    assert adapted is plugins.load("rl_core.environments", f"{HERE}:Plain")
    assert issubclass(adapted, Plain)
    assert (adapted.placement, adapted.offers_tools, adapted.forces_responses) == ("thread", False, False)
    made = adapted({"prompt": "?"}, {})
    assert (await made.reset(), made.tools, await made.structural_tag(None)) == ("?", ["saw"], None)


@pytest.mark.parametrize("made", [Any, object, "Any"])
def test_a_factory_without_a_declared_return_type_is_accepted(made: Any):
    def factory(rendezvous: Any) -> Any: ...

    factory.__annotations__["return"] = made
    assert RECEIVER.problem(factory) is None
    factory.__annotations__["return"] = int
    assert "the class int has no receive" in str(RECEIVER.problem(factory))


@pytest.mark.parametrize("path", ["math:pi", "os:getcwd", f"{HERE}:StepsWithoutAction.step", "nowhere:at_all"])
def test_prepare_of_a_recipe_must_accept_the_configuration(path: str):
    with pytest.raises(PluginError, match=f"^the recipe's `prepare`: '{re.escape(path)}'"):
        plugins.load_preparation(path)


def test_a_receiver_of_weights_must_accept_a_rendezvous():
    receiver = "rl_core.testing.reference_transport:MemoryReceiver"
    assert plugins.load_receiver(receiver) is MemoryReceiver
    for path in (f"{IDLE}:transport", f"{IDLE}:Event", "math:pi"):
        with pytest.raises(PluginError, match=f"^'{path}' is not a receiver of weights: "):
            plugins.load_receiver(path)
    with pytest.raises(PluginError, match="is not a weight transport"):
        plugins.load("rl_core.weight_transports", receiver, key="generator.inference_engine.weight_sync_backend")
