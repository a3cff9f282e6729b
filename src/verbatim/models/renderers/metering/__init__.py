"""Runs chat templates, which are untrusted programs, within a budget of steps, characters and time.

`meter` holds the budget, `environment` is the sandbox that counts, and `program` a template compiled for it.
"""
