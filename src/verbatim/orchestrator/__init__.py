"""The loop that owns time: rollouts, batches, weights, evaluation, checkpoints."""
