"""Compares runs: their configurations, curves, evaluations, final figures, ledgers and alarms."""
