"""Example of `verbatim.run`: runs a bundled recipe with changed settings and with a monitor. Needs no network."""

import verbatim
from verbatim.logs.monitors import Monitor


class Best(Monitor):
    """A monitor that remembers the best mean reward of any step."""

    def __init__(self):
        self.reward = 0.0

    def on_step(self, step, metrics, distributions):
        self.reward = max(self.reward, metrics["reward/mean"])


if __name__ == "__main__":
    best = Best()
    result = verbatim.run(
        "guess_number",
        max_steps=3,
        monitors=[best],
        warm_start={"steps": 150, "conversations": 400},
        orchestrator={"batch_size": 48, "group_size": 8, "eval": None},
    )
    print(f"best reward of a step: {best.reward:.2f}; {result.summary['trained_tokens']} tokens trained")
