"""A taskset whose policy may call a tool, which runs in a server of its own."""

from __future__ import annotations

import verifiers.v1 as vf
from vf_shop_tool import ShopToolset


class ShopData(vf.TaskData):
    price: int


class ShopTaskConfig(vf.TaskConfig):
    tools: vf.ToolsetConfig = vf.ToolsetConfig()


class ShopTask(vf.Task[ShopData, vf.State, ShopTaskConfig]):
    @classmethod
    def toolsets(cls, config: ShopTaskConfig) -> list[vf.Toolset]:
        return [ShopToolset(config.tools)]

    @vf.reward(weight=1.0)
    async def told(self, trace: vf.Trace) -> float:
        return float(str(self.data.price) in (trace.last_reply or ""))


class ShopConfig(vf.TasksetConfig):
    task: ShopTaskConfig = ShopTaskConfig()


class ShopTaskset(vf.Taskset[ShopTask, ShopConfig]):
    def load(self):
        return [
            ShopTask(ShopData(prompt=f"What do {count} apples cost?", price=3 * count), self.config.task)
            for count in range(1, 5)
        ]


__all__ = ["ShopTaskset"]
