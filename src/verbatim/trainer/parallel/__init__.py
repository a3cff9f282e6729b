"""Trains one model with several processes: parameters, gradients and optimizer state are sharded, micro-batches dealt.

Rank 0 leads: it is the only one that is called from outside, and announces each thing that all ranks do together.
"""
