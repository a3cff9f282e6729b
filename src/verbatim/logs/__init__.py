"""Writes what a run records, and reads it back: metrics and alarms, trajectories with their outcomes, checkpoints.

In: the results of a step. Out: log lines, Parquet files, and checkpoints that survive a power failure. Read first:
`monitors/monitor.py`, `checkpoints/run_folder.py`. Imports `core`, `config`, `models`, `rollouts`.
"""
