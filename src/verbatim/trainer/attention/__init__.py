"""Computes attention over packed samples: rows, prefix trees, and trees by flex attention."""
