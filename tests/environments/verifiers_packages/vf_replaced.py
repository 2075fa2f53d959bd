"""A taskset that replaces responses of the policy."""

from __future__ import annotations

import verifiers.v1 as vf


class ReplacedTask(vf.Task[vf.TaskData]):
    @vf.intercept
    async def polite(self, response: vf.Response) -> vf.Response:
        return response.model_copy(update={"message": vf.AssistantMessage(content="please")})


class ReplacedTaskset(vf.Taskset[ReplacedTask, vf.TasksetConfig]):
    def load(self):
        return [ReplacedTask(vf.TaskData(prompt="?"), self.config.task)]


__all__ = ["ReplacedTaskset"]
