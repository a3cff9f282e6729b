"""The command `verbatim`: a shell whose commands load only what they need, and the bundled recipes.

In: what a person types. Out: one call of what stands to its left, and its result for people. Read first: `main.py`.
Imports all others.
"""
