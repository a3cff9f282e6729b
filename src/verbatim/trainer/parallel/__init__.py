"""Trains one model with several processes: parameters, gradients and optimizer state are sharded (FSDP2), and
micro-batches are dealt to the ranks.

Rank 0 leads: only rank 0 is called from outside, and it sends the other ranks a command for everything that all ranks
do together.
"""
