"""Runs chat templates, which are untrusted programs, within a budget of steps, characters and time.

`meter` holds the budget, `environment` is the sandbox that charges it, `calls` computes what filters, methods and
operators cost, and `program` compiles a template for the sandbox.
"""
