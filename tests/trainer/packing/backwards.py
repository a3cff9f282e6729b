"""A packer of one's own: rows, the last micro-batch first."""

from verbatim.trainer.packing import pack_rows


def pack_backwards(samples, *, micro_batch_tokens, keep_whole):
    return pack_rows(samples, micro_batch_tokens=micro_batch_tokens, keep_whole=keep_whole)[::-1]
