"""Stores a run's trajectories, with the outcome of each sampled token, as one Parquet file per step.

This package needs pyarrow, so it is imported only where trajectories are written or read.
"""
