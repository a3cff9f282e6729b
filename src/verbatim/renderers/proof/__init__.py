"""Proofs about a chat template, once per template: may a prompt of it be continued?"""

from verbatim.renderers.proof.claims import Prover
from verbatim.renderers.proof.side_by_side import Refusal
from verbatim.renderers.proof.situation import REASONING, Situation
from verbatim.renderers.proof.table import Row, proof_table

__all__ = ["REASONING", "Prover", "Refusal", "Row", "Situation", "proof_table"]
