"""The training loop: rollouts, batches, weights, evaluation, checkpoints.

Read first: `loop.py`; `dispatcher.py` starts groups of rollouts and drops those without a gradient, `producer.py` makes
batches of them, `assemble.py` gives credit and filters, `step_metrics.py` reports.
"""
