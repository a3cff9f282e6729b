"""Lays runs side by side: their configurations, curves, evaluations, final figures, ledgers and alarms."""
