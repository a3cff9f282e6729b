"""Read-only tools that inspect runs, before they start and afterwards.

In: a run's configuration, environments and output. Out: a web page (`viewer`), the reasons why prompts break the
extension property (`doctor`), the faults of an environment (`envcheck`), a run's expected memory and speed (`plan`),
and a comparison of several runs (`comparison`). Read first: `plan/predict.py`, `doctor/diagnosis.py`. Imports all but
`cli`.
"""
