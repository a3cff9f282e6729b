"""Defines the records: messages, turns, training samples, micro-batches.

All records are frozen; ids are int32 arrays, logprobs are float32 arrays. Bad data is refused where it enters, with a
`RecordError` that names turn and position; nothing downstream checks it again. Import the records from
`verbatim.core.types`.
"""
