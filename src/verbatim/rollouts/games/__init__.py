"""Plays the games of the package `textarena`, in which the policy plays against itself or against other opponents."""
