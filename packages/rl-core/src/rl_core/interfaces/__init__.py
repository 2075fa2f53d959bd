"""The contracts between packages, and the records that cross them. Nothing else, and no torch at import.

A Protocol's `isinstance` proves names only; what a plug-in must DO is proved by the suites of `rl_core.testing`.
Optional abilities are Protocols of their own (`Offloadable`, `BackgroundSaver`, `Inspectable`, `Planner`, `Sleepable`).

Who implements what: a training package a `Backend` (and its `Worker`), a rollout package an `InferencePlugin` (and its
`InferenceClient`), a `WeightTransport`, a `Generator`; a recipe an `Environment`. `WorkerGroup` and the loop are ours.

    training    a model and its update, `Worker`, `Backend`
    weights     what a sync sends, `WeightTransport` and its two ends
    inference   token ids in, token ids out: `InferenceClient`, `InferencePlugin`
    rollouts    `Environment`, `Trajectory`, `Generator`
    runs        `Recipe`, `Tracker`, `Callback`
    version     which versions of each contract are accepted: `CONTRACTS`

All names are imported from here, whichever of these modules defines them.
"""

from __future__ import annotations

from rl_core.interfaces.inference import (
    AdapterServing,
    Completion,
    EngineHealth,
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
from rl_core.interfaces.rollouts import (
    Action,
    Environment,
    EnvironmentFactory,
    Generator,
    GeneratorFactory,
    GroupRequest,
    Message,
    Prompt,
    Row,
    StepResult,
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
    "Prompt",
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
    "InferencePlugin",
    "Action",
    "StepResult",
    "Environment",
    "EnvironmentFactory",
    "TrajectoryStep",
    "Turn",
    "Trajectory",
    "GroupRequest",
    "Generator",
    "GeneratorFactory",
    "Tracker",
    "TrackerFactory",
    "PhaseAware",
    "Callback",
    "Control",
    "Recipe",
]
