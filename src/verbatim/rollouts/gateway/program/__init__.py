"""Agent programs as environments: for each example, a program runs with the gateway as its model server."""
