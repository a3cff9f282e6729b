"""Predicts, before a run, the memory of each trainer process and the duration of a step in trainer and sampler."""
