"""Companions of a run: what it is, what it will need, what is wrong with it.

In: what a run is given, or has written. Out: a page (`viewer`), why prompts stop extending what was sampled
(`doctor`), what is wrong with an environment (`envcheck`), whether a run fits (`plan`), runs side by side
(`comparison`). Nothing is changed. Read first: `plan/predict.py`, `doctor/diagnosis.py`. Imports all but `cli`.
"""
