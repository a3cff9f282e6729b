"""Stores what a run sampled, and the outcome of every token of it, as Parquet files: one for each step.

The package needs pyarrow; it is imported where trajectories are written or read.
"""
