"""A taskset that needs a container."""

from __future__ import annotations

import verifiers.v1 as vf


class BoxedTask(vf.Task[vf.TaskData]):
    NEEDS_CONTAINER = True


class BoxedTaskset(vf.Taskset[BoxedTask, vf.TasksetConfig]):
    def load(self):
        return [BoxedTask(vf.TaskData(prompt="?"), self.config.task)]


__all__ = ["BoxedTaskset"]
