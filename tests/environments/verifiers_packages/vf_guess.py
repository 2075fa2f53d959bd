"""A taskset of several turns with an environment of its own, which answers each guess."""

from __future__ import annotations

import verifiers.v1 as vf


class GuessData(vf.TaskData):
    number: int


class GuessTask(vf.Task[GuessData]):
    @vf.reward(weight=1.0)
    async def found(self, trace: vf.Trace) -> float:
        return float((trace.last_reply or "") == str(self.data.number))


class GuessTaskset(vf.Taskset[GuessTask, vf.TasksetConfig]):
    def load(self):
        return [GuessTask(GuessData(prompt="?", number=number), self.config.task) for number in range(10)]


class GuessConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()


class GuessEnv(vf.Env[GuessConfig]):
    async def run(self, task, agents):
        async with agents.player.interaction(task) as interaction:
            segment = await interaction.turn()
            guesses = 1
            while not segment.terminated and guesses < 3 and segment.last_reply != str(task.data.number):
                said = segment.last_reply
                hint = ">" if said.isdigit() and int(said) < task.data.number else "<"
                segment = await interaction.turn(hint)
                guesses += 1
        interaction.trace.record_metric("guesses", guesses)


__all__ = ["GuessEnv", "GuessTaskset"]
