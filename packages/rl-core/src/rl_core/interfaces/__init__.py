"""The contracts between packages and the records that they exchange. Importing them does not import torch.

A contract is one class, which authors inherit. Its required methods are abstract. An optional ability is a method with
a default and, only where a run must know of it before it starts, one flag: an attribute with a default (`can_offload`).
Callers ask the flag, never `isinstance`. The suites of `rl_core.testing` check the behaviour of a plug-in.

A training package implements `Backend` and `Worker`. A rollout package implements `EnginePlugin` and
`InferenceClient`, `WeightTransport`, `GeneratorPlugin` and `Generator`. An environment package implements
`Environment`. rl_core itself contains `WorkerGroup` and the loop. A plug-in gets what it needs as plain data, including
its own options: `WorkerSpec`, `EngineSpec`, `GeneratorSpec`.

    training    a model and its update, `Worker`, `Backend`
    weights     what a sync sends, `WeightTransport`, its senders and receivers
    inference   token ids in, token ids out: `InferenceClient`, `EnginePlugin`
    messages    chat messages and tools, in the form that chat templates expect
    rollouts    `Environment`, `Trajectory`, `Generator`, `GeneratorPlugin`
    thoughts    a response's thinking, and the answer without it
    results     checks of what the methods of an environment return
    options     validators of keys that a plug-in declares
    runs        `Recipe`, `Tracker`, `Callback`

Import all names from this package; the modules that define them may change.
"""

from __future__ import annotations

from rl_core.interfaces.inference import (
    Completion,
    EngineHealth,
    EnginePlan,
    EnginePlugin,
    EngineSpec,
    GenerateRequest,
    InferenceClient,
    KeptTokens,
    PauseMode,
    Sampler,
    SamplingParams,
    ServedModel,
    StopReason,
)
from rl_core.interfaces.messages import (
    EXAMPLE_CALL,
    Message,
    Prompt,
    ToolSchema,
    decoded_messages,
    require_messages,
    require_tools,
    split_pair,
)
from rl_core.interfaces.options import (
    FINITE,
    Bound,
    above,
    at_least,
    at_most,
    between,
    bounded,
    bounds_of,
)
from rl_core.interfaces.results import (
    require_awaitable,
    require_observed_messages,
    require_observed_text,
    require_step_result,
)
from rl_core.interfaces.rollouts import (
    Action,
    Environment,
    Generator,
    GeneratorPlugin,
    GeneratorSpec,
    GroupRequest,
    PlacementKind,
    Row,
    StepResult,
    Trajectory,
    TrajectoryEnd,
    TrajectoryStep,
    Turn,
    as_environment,
)
from rl_core.interfaces.runs import (
    Callback,
    Control,
    Recipe,
    Tracker,
)
from rl_core.interfaces.thoughts import (
    CHANNEL_TOKENS,
    THOUGHT_TOKENS,
    opened_thought,
    unfinished_thought,
    without_thought,
)
from rl_core.interfaces.training import (
    Backend,
    HeldKind,
    LoraConfig,
    LossSpec,
    Metrics,
    ModelConfig,
    OptimizerConfig,
    OptimizerStep,
    OptimizerUpdate,
    Plan,
    RankInfo,
    RankPlan,
    RehearsedPhase,
    Role,
    Worker,
    WorkerSpec,
)
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
    "EXAMPLE_CALL",
    "Message",
    "Metrics",
    "Plan",
    "PlacementKind",
    "Prompt",
    "ToolSchema",
    "decoded_messages",
    "require_messages",
    "require_tools",
    "split_pair",
    "require_awaitable",
    "require_observed_messages",
    "require_observed_text",
    "require_step_result",
    "Role",
    "Row",
    "StopReason",
    "PauseMode",
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
    "HeldKind",
    "RankPlan",
    "RehearsedPhase",
    "Backend",
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
    "ServedModel",
    "EngineSpec",
    "EnginePlan",
    "EnginePlugin",
    "KeptTokens",
    "CHANNEL_TOKENS",
    "THOUGHT_TOKENS",
    "opened_thought",
    "unfinished_thought",
    "without_thought",
    "Action",
    "StepResult",
    "Environment",
    "as_environment",
    "TrajectoryStep",
    "Turn",
    "Trajectory",
    "GroupRequest",
    "Generator",
    "GeneratorSpec",
    "GeneratorPlugin",
    "FINITE",
    "Bound",
    "at_least",
    "at_most",
    "bounded",
    "bounds_of",
    "above",
    "between",
    "Tracker",
    "Callback",
    "Control",
    "Recipe",
]
