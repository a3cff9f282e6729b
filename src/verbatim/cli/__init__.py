"""The command `verbatim`: a shell whose commands load only what they need."""
