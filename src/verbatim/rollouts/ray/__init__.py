"""Runs episodes on the actors of a Ray cluster."""
