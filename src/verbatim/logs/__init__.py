"""What a run writes, and reads again: metrics and alarms, trajectories with their outcomes, checkpoints.

In: what happened in a step. Out: lines, Parquet files, folders that survive a loss of power. Read first:
`monitors/monitor.py`, `checkpoints/run_folder.py`. Imports `core`, `config`, `models`, `rollouts`.
"""
