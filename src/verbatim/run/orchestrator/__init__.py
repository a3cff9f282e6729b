"""The training loop: rollouts, batches, weights, evaluation, checkpoints.

Start reading at `loop.py`. `dispatcher.py` launches groups of rollouts and drops groups without a gradient,
`producer.py` makes batches from them, `assemble.py` assigns credit and applies filters, `step_metrics.py` reports.
"""
