"""Harnesses that play verifiers' tasks. `verifiers.environment` adds this folder to those with verifiers' own
harnesses."""
