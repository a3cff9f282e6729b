"""Episodes in child processes of this machine."""
