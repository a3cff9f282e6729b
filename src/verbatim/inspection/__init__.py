"""Read-only tools that inspect runs, before they start and afterwards.

In: a run's configuration, environments and output. Out: a web page (`viewer`), why prompts break the extension
property (`doctor`), faults of an environment (`envcheck`), whether a run fits in memory and how fast it will be
(`plan`), several runs compared (`comparison`). Read first: `plan/predict.py`, `doctor/diagnosis.py`. Imports all but
`cli`.
"""
