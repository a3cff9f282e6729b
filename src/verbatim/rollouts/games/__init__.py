"""Plays the games of the package `textarena`, against the policy itself or other opponents."""
