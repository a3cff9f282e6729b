"""Harnesses that play verifiers' tasks. `verifiers.environment` adds this folder to verifiers' own harnesses."""
