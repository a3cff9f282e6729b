"""The `verbatim` command line: a shell that imports only the command that was typed, and the bundled recipes.

Input: a command line. Output: one call into the other packages, and its result in readable form. Read first: `main.py`.
Imports all others.
"""
