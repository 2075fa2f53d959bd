"""A taskset of one turn: the answer is a text, graded by two rewards."""

from __future__ import annotations

import verifiers.v1 as vf


class SpellData(vf.TaskData):
    answer: str


class SpellTask(vf.Task[SpellData]):
    @vf.reward(weight=1.0)
    async def right(self, trace: vf.Trace) -> float:
        said = trace.last_reply or ""
        return sum(a == b for a, b in zip(said, self.data.answer, strict=False)) / len(self.data.answer)

    @vf.reward(weight=0.5)
    async def short(self, trace: vf.Trace) -> float:
        return 1.0 if len(trace.last_reply or "") <= len(self.data.answer) else 0.0

    @vf.metric
    async def length(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply or ""))


class SpellConfig(vf.TasksetConfig):
    digits: int = 2


class SpellTaskset(vf.Taskset[SpellTask, SpellConfig]):
    def load(self):
        for number in range(10**self.config.digits):
            answer = str(number).zfill(self.config.digits)
            yield SpellTask(SpellData(prompt=f"{answer}=", system_prompt="+", answer=answer), self.config.task)


__all__ = ["SpellTaskset"]
