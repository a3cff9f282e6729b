"""Runs episodes in other processes: the worker pool, serialization and token counts."""
