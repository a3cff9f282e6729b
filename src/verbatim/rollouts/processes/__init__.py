"""Runs episodes in child processes of this machine."""
