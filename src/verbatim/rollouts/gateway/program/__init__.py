"""Agent programs as environments: each example is a run of a program that asks the gateway."""
