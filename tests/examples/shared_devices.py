"""An engine and a backend that share devices. Weights that leave the devices are unusable until they return.

Both record what they do in `EVENTS`. Once the engine has slept, an engine or a model that computes fails unless it is
alone on the devices.
"""

from __future__ import annotations

from rl_core.interfaces import EnginePlugin, EngineSpec, InferenceClient, RankInfo, Worker, WorkerSpec
from rl_fsdp.backend import FsdpBackend
from rl_transformers.testing.reference_engine import ReferenceEngine

EVENTS: list[str] = []
ON_DEVICES: set[str] = set()


class SleepingEngine(ReferenceEngine):
    """Once it has slept, fails if it generates or wakes while a model is on the devices."""

    async def generate(self, request):
        if EVENTS[-1] != "generate":
            EVENTS.append("generate")
        assert "engine sleeps" not in EVENTS or {"engine"} == ON_DEVICES, ON_DEVICES
        return await super().generate(request)

    async def sleep(self):
        EVENTS.append("engine sleeps")
        ON_DEVICES.discard("engine")
        await super().sleep()

    async def wake(self, tags=None):
        EVENTS.append(f"engine wakes: {tags}")
        assert not ON_DEVICES - {"engine"}, "the models must leave before the engine takes memory"
        ON_DEVICES.add("engine")
        await super().wake(tags)

    async def update_weights(self, rendezvous, version):
        manifest = await super().update_weights(rendezvous, version)
        EVENTS.append(f"weights {version}")
        return manifest


class SleepingEnginePlugin(EnginePlugin):
    name = "sleeping"

    async def create(self, spec: EngineSpec) -> InferenceClient:
        ON_DEVICES.add("engine")
        EVENTS.append("engine starts")
        return SleepingEngine.from_checkpoint(spec.model_path)


engine = SleepingEnginePlugin()


class LeavingFsdp(FsdpBackend):
    """Fills parameters and moments with NaN while they are off the devices."""

    def create_worker(self, spec: WorkerSpec, rank: RankInfo) -> Worker:
        from rl_fsdp.worker import FsdpWorker

        class LeavingWorker(FsdpWorker):
            def __init__(self, *args):
                super().__init__(*args)
                self.elsewhere = {}
                EVENTS.append(f"{spec.role} starts")
                ON_DEVICES.add(spec.role)

            def tensors(self, *, parameters, optimizer):
                held = self.optimizer.state.values() if optimizer and self.optimizer else ()
                moments = [tensor for state in held for tensor in state.values()]
                return [*(self.scorer.parameters() if parameters else ()), *moments]

            def offload(self, *, parameters, optimizer):
                for tensor in self.tensors(parameters=parameters, optimizer=optimizer):
                    self.elsewhere[id(tensor)] = tensor.detach().clone()
                    tensor.data.fill_(float("nan"))
                if parameters:
                    EVENTS.append(f"{spec.role} leaves")
                    ON_DEVICES.discard(spec.role)

            def onload(self, *, parameters, optimizer):
                for tensor in self.tensors(parameters=parameters, optimizer=optimizer):
                    if id(tensor) in self.elsewhere:
                        tensor.data.copy_(self.elsewhere.pop(id(tensor)))
                if parameters:
                    EVENTS.append(f"{spec.role} comes back")
                    ON_DEVICES.add(spec.role)

            def forward(self, *args, **kwargs):
                self.require_alone()
                return super().forward(*args, **kwargs)

            def forward_backward(self, *args, **kwargs):
                self.require_alone()
                return super().forward_backward(*args, **kwargs)

            def save_state(self, directory):
                self.require_alone()
                EVENTS.append("checkpoint")
                super().save_state(directory)

            def require_alone(self):
                assert "engine sleeps" not in EVENTS or {spec.role} == ON_DEVICES, ON_DEVICES

        return LeavingWorker(spec, rank)


backend = LeavingFsdp()
