"""A taskset whose tasks fail in different ways, by name."""

from __future__ import annotations

import os
import signal

import verifiers.v1 as vf

PICTURE = vf.ImageUrlContentPart(image_url=vf.ImageUrlSource(url="data:image/png;base64,AA=="))


class OddTask(vf.Task[vf.TaskData]):
    async def setup(self, trace: vf.Trace, runtime: vf.Runtime) -> None:
        print("a task may print")
        if self.data.name == "setup":
            raise RuntimeError("no disk")
        if self.data.name == "killed":
            os.kill(os.getpid(), signal.SIGKILL)

    @vf.reward
    async def any(self, trace: vf.Trace) -> float:
        if self.data.name == "reward":
            raise ValueError("no answer key")
        return float("inf") if self.data.name == "infinite" else 1.0


class OddTaskset(vf.Taskset[OddTask, vf.TasksetConfig]):
    def load(self):
        yield OddTask(vf.TaskData(name="fine", prompt="?"), self.config.task)
        yield OddTask(vf.TaskData(name="opened by a user"), self.config.task)


class OddEnvConfig(vf.EnvConfig):
    agent: vf.AgentConfig = vf.AgentConfig()


class OddEnv(vf.Env[OddEnvConfig]):
    async def run(self, task, agents):
        if task.data.name == "pictures":
            async with agents.agent.interaction(task) as interaction:
                await interaction.turn()
                await interaction.turn([vf.UserMessage(content=[PICTURE])])
        else:
            await agents.agent.run(task)
        if task.data.name == "twice":
            await agents.agent.run(task)


__all__ = ["OddEnv", "OddTaskset"]
