"""A taskset with an environment of its own: a solver answers, and a judge that is not trained is asked about it."""

import verifiers.v1 as vf


class Question(vf.TaskData):
    pass


class QuestionTask(vf.Task[Question, vf.State, vf.TaskConfig]):
    pass


class Questions(vf.Taskset[QuestionTask, vf.TasksetConfig]):
    def load(self):
        yield QuestionTask(Question(prompt="5 6"), self.config.task)


class JudgedConfig(vf.EnvConfig):
    solver: vf.AgentConfig = vf.AgentConfig()
    judge: vf.AgentConfig = vf.AgentConfig()


class Judged(vf.Env[JudgedConfig]):
    async def setup(self, agents):
        agents.judge.trainable = False

    async def run(self, task, agents):
        solved = await agents.solver.run(task)
        verdict = await agents.judge.run(QuestionTask(Question(prompt=f"judge {solved.last_reply}")))
        solved.record_reward("judged", float(verdict.last_reply == "yes"))


__all__ = ["Judged", "Questions"]
