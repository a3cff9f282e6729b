"""Programs that play verifiers' tasks; `verifiers.environment` puts this folder among verifiers' own harnesses."""
