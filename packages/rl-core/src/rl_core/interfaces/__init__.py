"""The contracts between packages, and the records that cross them. Nothing else, and no torch at import.

A Protocol's `isinstance` proves names only; what a plug-in must DO is proved by the suites of `rl_core.testing`.
Optional abilities are Protocols of their own: of workers `Offloadable`, `BackgroundSaver`, `Perturbable`,
`Inspectable`; of backends `Planner`, `RouteFollowing`; of engines `Sleepable`, `Scoring`, `WeightReceivers`,
`Recovering`, `AdapterServing`; of environments `Tools`, `Placement`, `Snapshotable`; of trackers `PhaseAware`; of any
with keys of its own `Configurable`.

Who implements what: a training package a `Backend` (and its `Worker`), a rollout package an `InferencePlugin` (and its
`InferenceClient`), a `WeightTransport`, a `GeneratorPlugin` (and its `Generator`); a recipe an `Environment`.
`WorkerGroup` and the loop are ours. A plug-in is told what it needs as plain data: `WorkerSpec`, `EngineSpec`,
`GeneratorSpec`, each with the plug-in's own options in it.

    training    a model and its update, `Worker`, `Backend`
    weights     what a sync sends, `WeightTransport` and its two ends
    inference   token ids in, token ids out: `InferenceClient`, `InferencePlugin`
    messages    chat messages and tools, as chat templates read them
    rollouts    `Environment`, `Trajectory`, `Generator`, `GeneratorPlugin`
    options     keys of a plug-in's own: `Configurable`, and validators for them
    runs        `Recipe`, `Tracker`, `Callback`
    version     which versions of each contract are accepted: `CONTRACTS`

All names are imported from here, whichever of these modules defines them.
"""

from __future__ import annotations

from rl_core.interfaces.inference import (
    AdapterServing,
    Completion,
    EngineHealth,
    EngineSpec,
    GenerateRequest,
    InferenceClient,
    InferencePlugin,
    Recovering,
    Sampler,
    SamplingParams,
    Scoring,
    Sleepable,
    StopReason,
    WeightReceivers,
)
from rl_core.interfaces.messages import Message, Prompt, ToolSchema, require_messages, require_tools
from rl_core.interfaces.options import Configurable, above, at_least, between
from rl_core.interfaces.rollouts import (
    Action,
    Environment,
    EnvironmentFactory,
    Generator,
    GeneratorFactory,
    GeneratorPlugin,
    GeneratorSpec,
    GroupRequest,
    Placement,
    PlacementKind,
    Row,
    Snapshotable,
    StepResult,
    Tools,
    Trajectory,
    TrajectoryEnd,
    TrajectoryStep,
    Turn,
)
from rl_core.interfaces.runs import (
    Callback,
    Control,
    PhaseAware,
    Recipe,
    Tracker,
    TrackerFactory,
)
from rl_core.interfaces.training import (
    Backend,
    BackgroundSaver,
    Inspectable,
    LoraConfig,
    LossSpec,
    Metrics,
    ModelConfig,
    Offloadable,
    OptimizerConfig,
    OptimizerStep,
    OptimizerUpdate,
    Perturbable,
    Plan,
    Planner,
    RankInfo,
    RankPlan,
    Role,
    RouteFollowing,
    Worker,
    WorkerSpec,
)
from rl_core.interfaces.version import CONTRACT_VERSION, CONTRACTS, Contract
from rl_core.interfaces.weights import (
    Manifest,
    Rendezvous,
    TensorRecord,
    WeightBucket,
    WeightReceiver,
    WeightSender,
    WeightTransport,
)

__all__ = [
    "CONTRACT_VERSION",
    "CONTRACTS",
    "Contract",
    "Message",
    "Metrics",
    "Plan",
    "PlacementKind",
    "Prompt",
    "ToolSchema",
    "require_messages",
    "require_tools",
    "Role",
    "Row",
    "StopReason",
    "TrajectoryEnd",
    "OptimizerConfig",
    "LoraConfig",
    "ModelConfig",
    "WorkerSpec",
    "RankInfo",
    "LossSpec",
    "OptimizerStep",
    "OptimizerUpdate",
    "Worker",
    "Offloadable",
    "BackgroundSaver",
    "Perturbable",
    "Inspectable",
    "RankPlan",
    "Planner",
    "Backend",
    "RouteFollowing",
    "WeightBucket",
    "TensorRecord",
    "Manifest",
    "Rendezvous",
    "WeightSender",
    "WeightReceiver",
    "WeightTransport",
    "SamplingParams",
    "GenerateRequest",
    "Completion",
    "EngineHealth",
    "Sampler",
    "InferenceClient",
    "Sleepable",
    "Recovering",
    "WeightReceivers",
    "Scoring",
    "AdapterServing",
    "EngineSpec",
    "InferencePlugin",
    "Action",
    "StepResult",
    "Environment",
    "EnvironmentFactory",
    "Tools",
    "Placement",
    "Snapshotable",
    "TrajectoryStep",
    "Turn",
    "Trajectory",
    "GroupRequest",
    "Generator",
    "GeneratorSpec",
    "GeneratorPlugin",
    "Configurable",
    "at_least",
    "above",
    "between",
    "GeneratorFactory",
    "Tracker",
    "TrackerFactory",
    "PhaseAware",
    "Callback",
    "Control",
    "Recipe",
]
