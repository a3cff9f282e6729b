"""Tokens that a loss masks are trained tokens; the ledger counts them over the whole run."""

import dataclasses

from loop_runs import FakeTrainer, make


class MaskingTrainer(FakeTrainer):
    def report(self, samples, version, checkpoint):
        report = super().report(samples, version, checkpoint)
        return dataclasses.replace(report, metrics={**report.metrics, "masked_by_loss": float(version)})


async def test_masked_tokens_are_added_up_over_the_steps(tmp_path):
    orchestrator, notes, _ = make(tmp_path, level=0, steps=3, trainer=MaskingTrainer(tmp_path))
    await orchestrator.run()
    assert [metrics["ledger/masked_by_loss"] for _, metrics, _ in notes.steps] == [1, 3, 6]
    ledger = orchestrator.ledger_for_tests
    assert ledger.sampled == ledger.trained + sum(ledger.dropped.values())
