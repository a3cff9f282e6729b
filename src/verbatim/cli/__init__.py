"""The `verbatim` command line: a shell that imports only the command that was typed, and the bundled recipes.

Input: what a person types. Output: one call into the other packages, and its result in readable form. Start reading at
`main.py`. Imports all other packages.
"""
