"""Checks of plug-ins at each extension point (seam): the kind of object, its members, and the calls they must accept.

The checks are derived from the contracts: for each method of a Protocol, they bind the signature of the object's method
to the Protocol's parameters, without calling the method. So methods with the right names but wrong parameters are found
before a run. The suites of `rl_core.testing` check the behaviour of a plug-in.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import attrs

from rl_core.errors import PluginError, nearest
from rl_core.function_settings import positional_parameters
from rl_core.interfaces import (
    Backend,
    Callback,
    EnginePlugin,
    Environment,
    GeneratorPlugin,
    Recipe,
    Tracker,
    WeightReceiver,
    WeightTransport,
    as_environment,
)

_MOST_NAMED = 4
"""A message names at most this many missing members."""


@attrs.frozen(kw_only=True)
class Seam:
    """An extension point: a run selects one or more objects for it by name."""

    plural: str = ""
    """The objects' name in lists, in the plural; empty if no list shows them."""
    singular: str
    """The name of one such object, with its article."""
    expected: str
    """Description of a valid object, for messages."""
    problem: Callable[[Any], str | None]
    """Why an object is not valid; None if it is."""


def _of_plugin(contract: type, found: Any, *, flags: Mapping[str, str] = {}) -> str | None:
    """Why an object is not an instance of a class that inherits and fulfils the contract; None if it is.

    Args:
        flags: see `_unflagged`.
    """
    if inspect.isclass(found):
        return f"it is the class {found.__name__}, not an instance of it"
    if contract not in type(found).__mro__:
        return f"{_described(found)} does not inherit rl_core.interfaces.{contract.__name__}"
    kinds = {"str": str, "bool": bool, "type": type}
    wanted = {name: kinds[kind] for name, kind in inspect.get_annotations(contract).items() if kind in kinds}
    wrong = (
        f"its {name} is {value!r:.60}, expected {kind.__name__}"
        for name, kind in wanted.items()
        if not isinstance(value := getattr(found, name), kind)
    )
    methods = {name: member for name, member in members(contract).items() if inspect.isfunction(member)}
    return (
        _lacks(found, wanted)
        or next(wrong, None)
        or _first(_member_problem(found, name, member) for name, member in methods.items())
        or _unflagged(found, contract, flags)
    )


def _of_environment(found: Any) -> str | None:
    if not inspect.isclass(found):
        return f"it is {_described(found)}"
    try:
        adapted = as_environment(found)
    except TypeError as error:  # a class with a metaclass of its own, or one that no class may inherit
        return f"{_described(found)} cannot inherit rl_core.interfaces.Environment: {error}"
    return (
        _lacks_required(found, adapted)
        or call_problem(found.__name__, Environment.__init__, found)
        or _class_problem(adapted, members(Environment))
        or _unflagged(adapted, Environment, {"tools": "offers_tools", "structural_tag": "forces_responses"})
    )


def _of_class(contract: type, found: Any) -> str | None:
    """Why an object is not a class that inherits and fulfils the contract; None if it is."""
    if not inspect.isclass(found):
        return f"it is {_described(found)}"
    if contract not in found.__mro__:
        return f"{_described(found)} does not inherit rl_core.interfaces.{contract.__name__}"
    return (
        _lacks_required(found, found)
        or call_problem(found.__name__, vars(contract)["__init__"], found)
        or _class_problem(found, members(contract))
    )


def _of_loss(found: Any) -> str | None:
    from rl_core.algorithms.loss_parameters import require_loss_parameters  # imports torch, as losses do

    problem = _of_function(found)
    if problem is None:
        try:
            require_loss_parameters(found)
        except PluginError as error:
            problem = str(error)
    return problem


def _of_estimator(found: Any) -> str | None:
    from rl_core.algorithms.advantages import ESTIMATOR_COLUMNS  # imports torch, as estimators do

    problem = _of_function(found)
    unknown = [] if problem else [name for name in positional_parameters(found) if name not in ESTIMATOR_COLUMNS]
    if unknown:
        return (
            f"it has the parameter {unknown[0]!r}; an estimator reads {', '.join(ESTIMATOR_COLUMNS)}."
            f"{nearest(unknown[0], ESTIMATOR_COLUMNS)} A setting must be keyword-only: put it after `*`"
        )
    return problem


def _of_function(found: Any) -> str | None:
    """Why an object is not a function whose positional parameters name the columns that it reads; None if it is one."""
    if inspect.isclass(found) or not callable(found):
        return f"it is {_described(found)}"
    if not _can_be_read(found):
        return f"the parameters of {_described(found)} cannot be inspected; wrap it in a function"
    reads_any = positional_parameters(found)
    return None if reads_any else f"{_described(found)} has no positional parameter, so it reads no column"


def _of_recipe(found: Any) -> str | None:
    return None if isinstance(found, Recipe) or _takes_nothing(found) else f"it is {_described(found)}"


def _of_directory(found: Any) -> str | None:
    if not isinstance(found, Path):
        return f"it is {_described(found)}"
    return None if found.is_dir() else f"{found} is not a directory"


def _of_preparation(found: Any) -> str | None:
    return call_problem(_name(found), _prepare, found) if callable(found) else f"it is {_described(found)}"


def _prepare(self: None, config: Any) -> None:
    """Has the signature of a recipe's `prepare`, preceded by the `self` that `call_problem` skips."""


def _of_receiver(found: Any) -> str | None:
    if not callable(found):
        return f"it is {_described(found)}"
    problem, product = call_problem(_name(found), _build_receiver, found), _product_class(found)
    if problem or product is None:
        return problem
    return _class_problem(product, members(WeightReceiver))


def _build_receiver(self: None, rendezvous: Any) -> None:
    """Has the signature with which an engine creates its receiver, preceded by the `self` that `call_problem` skips."""


SEAMS: Mapping[str, Seam] = {
    "rl_core.backends": Seam(
        plural="training backends",
        singular="a training backend",
        expected="an instance of a class that inherits rl_core.interfaces.Backend",
        problem=partial(
            _of_plugin,
            Backend,
            flags={"plan": "can_plan", "rehearse": "can_rehearse"},
        ),
    ),
    "rl_core.inference": Seam(
        plural="inference engines",
        singular="an inference engine",
        expected="an instance of a class that inherits rl_core.interfaces.EnginePlugin",
        problem=partial(_of_plugin, EnginePlugin),
    ),
    "rl_core.weight_transports": Seam(
        plural="weight transports",
        singular="a weight transport",
        expected="an instance of a class that inherits rl_core.interfaces.WeightTransport",
        problem=partial(_of_plugin, WeightTransport),
    ),
    "rl_core.generators": Seam(
        plural="generators",
        singular="a generator",
        expected="an instance of a class that inherits rl_core.interfaces.GeneratorPlugin",
        problem=partial(_of_plugin, GeneratorPlugin),
    ),
    "rl_core.environments": Seam(
        plural="environments",
        singular="an environment",
        expected="a class with the methods of rl_core.interfaces.Environment, created as Class(row, options)",
        problem=_of_environment,
    ),
    "rl_core.advantage_estimators": Seam(
        plural="advantage estimators",
        singular="an advantage estimator",
        expected="a function whose positional parameters are columns (docs/plugins.md#an-estimator)",
        problem=_of_estimator,
    ),
    "rl_core.policy_losses": Seam(
        plural="policy losses",
        singular="a loss",
        expected="a function whose positional parameters are columns (docs/algorithms.md#your-own-function)",
        problem=_of_loss,
    ),
    "rl_core.trackers": Seam(
        plural="trackers",
        singular="a tracker",
        expected="a class that inherits rl_core.interfaces.Tracker",
        problem=partial(_of_class, Tracker),
    ),
    "rl_core.callbacks": Seam(
        plural="callbacks",
        singular="a callback",
        expected="a class that inherits rl_core.interfaces.Callback",
        problem=partial(_of_class, Callback),
    ),
    "rl_core.recipes": Seam(
        plural="recipes",
        singular="a recipe",
        expected="a Recipe (rl_core.interfaces), or a function without parameters that returns one",
        problem=_of_recipe,
    ),
    "rl_core.model_configs": Seam(
        plural="model configurations",
        singular="a directory of model configurations",
        expected="a pathlib.Path of a directory with <organisation>/<model>/config.json",
        problem=_of_directory,
    ),
}
"""Entry-point group → extension point."""
PREPARATION = Seam(
    singular="a function that prepares a recipe",
    expected="a function that is called with the configuration",
    problem=_of_preparation,
)
RECEIVER = Seam(
    singular="a receiver of weights",
    expected="a class or function (rendezvous) → rl_core.interfaces.WeightReceiver",
    problem=_of_receiver,
)


# --- reading contracts ----------------------------------------------------------------------------------------------


def members(contract: type) -> dict[str, Any]:
    """Name → method or property of a Protocol or class. Inherited members come first."""
    bases = [base for base in reversed(contract.__mro__) if base.__module__ not in ("builtins", "typing")]
    return {name: member for base in bases for name, member in vars(base).items() if not name.startswith("_")}


def call_problem(name: str, expected: Callable[..., Any], actual: Any) -> str | None:
    """Why `actual` cannot be called with the parameters of the contract's method `expected`. None if it can, or if the
    parameters of `actual` cannot be inspected.

    Positional parameters are passed by position, so their names may differ; keyword-only ones are passed by name.

    Args:
        expected: a method, whose first parameter is `self`.
        actual: a bound method, a function, a class or another callable.
    """
    passed = list(inspect.signature(expected).parameters.values())[1:]
    by_name = [p.name for p in passed if p.kind is p.KEYWORD_ONLY]
    by_position = [p.name for p in passed if p.kind is not p.KEYWORD_ONLY]
    try:
        signature = inspect.signature(actual)
    except (TypeError, ValueError):
        return None
    try:
        signature.bind(*by_position, **dict.fromkeys(by_name))
    except TypeError as error:
        call = ", ".join([*by_position, *(f"{name}=…" for name in by_name)])
        return f"{name}{_plain(signature)} cannot be called as {name}({call}): {error}"
    if inspect.iscoroutinefunction(actual) and not inspect.iscoroutinefunction(expected):
        return f"{name} is `async`, but it is called without `await`"
    return None


def _takes_nothing(found: Any) -> bool:
    """Whether an object can be called without arguments; False if its parameters cannot be inspected."""
    try:
        inspect.signature(found).bind()
    except (TypeError, ValueError):  # TypeError: not callable, or needs arguments; ValueError: no signature (C code)
        return False
    return True


def _member_problem(found: Any, name: str, expected: Any) -> str | None:
    """Why one member of an object does not fulfil the contract; None if it does."""
    actual = getattr(found, name)
    if not callable(actual):
        return f"its {name} is {actual!r:.60}, expected a method"
    return call_problem(name, expected, actual)


def _class_problem(found: type, expected: Mapping[str, Any]) -> str | None:
    """Says which of these methods a class lacks, or why one of them cannot be called as the contract says. None if all
    can be called. Other members are not checked, because `__init__` may set them."""
    methods = {name: member for name, member in expected.items() if inspect.isfunction(member)}
    return _lacks(found, methods) or _first(
        _class_method_problem(found, name, method) for name, method in methods.items()
    )


def _class_method_problem(found: type, name: str, expected: Callable[..., Any]) -> str | None:
    actual = inspect.getattr_static(found, name)
    if inspect.isfunction(actual):
        return call_problem(name, expected, actual.__get__(object()))
    return None if callable(getattr(found, name)) else f"its {name} is {actual!r:.60}, expected a method"


def _product_class(factory: Any) -> type | None:
    """The class of the objects that a factory creates: the factory itself if it is a class, or its return annotation.
    None if unknown."""
    if inspect.isclass(factory):
        return factory
    made = getattr(factory, "__annotations__", {}).get("return")
    made = getattr(factory, "__globals__", {}).get(made) if isinstance(made, str) else made
    return made if inspect.isclass(made) and made not in (Any, object) else None


def _lacks_required(found: type, adapted: type) -> str | None:
    """Says which required methods of its contract a class lacks; None if it lacks none."""
    missing = sorted(getattr(adapted, "__abstractmethods__", ()))
    return f"{_described(found)} has no {', '.join(missing)}" if missing else None


def _unflagged(found: Any, contract: type, flags: Mapping[str, str]) -> str | None:
    """Says which optional method a class or its instance defines without the flag with which the run asks for it, or
    which flag it sets without the method; None if flags and methods agree.

    Args:
        flags: method → flag.
    """
    cls = found if inspect.isclass(found) else type(found)
    for method, flag in flags.items():
        is_defined = getattr(cls, method) is not getattr(contract, method)
        if is_defined and not getattr(found, flag):
            return f"it defines {method}, but its {flag} is false, so {method} would not be called; set {flag} = True"
        if getattr(found, flag) and not is_defined:
            return f"its {flag} is true, but it does not define {method}"
    return None


def _lacks(found: Any, expected: Iterable[str]) -> str | None:
    missing = [name for name in expected if not hasattr(found, name)]
    if not missing:
        return None
    more = f" and {len(missing) - _MOST_NAMED} more" if len(missing) > _MOST_NAMED else ""
    return f"{_described(found)} has no {', '.join(missing[:_MOST_NAMED])}{more}"


def _can_be_read(found: Any) -> bool:
    """Whether the object's parameters can be inspected."""
    try:
        inspect.signature(found)
    except (TypeError, ValueError):
        return False
    return True


def _first(problems: Iterable[str | None]) -> str | None:
    return next(filter(None, problems), None)


def _name(found: Any) -> str:
    return getattr(found, "__name__", type(found).__name__)


def _described(found: Any) -> str:
    if inspect.isclass(found):
        return f"the class {found.__name__}"
    if inspect.isroutine(found):
        return f"the function {found.__name__}"
    return f"an object of type {type(found).__name__}"


def _plain(signature: inspect.Signature) -> str:
    """The signature as text, without annotations."""
    parameters = [p.replace(annotation=p.empty) for p in signature.parameters.values()]
    return str(signature.replace(parameters=parameters, return_annotation=signature.empty))
