"""Carries the exchange between two hosts that share no folder, over HTTP.

The orchestrator's host listens (`server`), the trainer's host connects (`trainer_side`): trainers sit behind a
scheduler, on hosts that nothing can connect to, and there is one of them. Either side works in a run folder of its own,
as if the other one did too.
"""
