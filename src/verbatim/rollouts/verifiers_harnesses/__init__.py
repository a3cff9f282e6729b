"""Programs that play verifiers' tasks; `verifiers_environment` puts this folder among verifiers' own harnesses."""
