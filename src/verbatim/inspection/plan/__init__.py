"""Predicts, before a run, the memory of each process of the trainer, and the seconds of a step on both sides."""
