"""A chat template is a program from elsewhere: it renders within a budget of steps, characters and time, or not at all.

`meter` holds the budget, `environment` is the sandbox that counts, and `program` a template compiled for it.
"""
