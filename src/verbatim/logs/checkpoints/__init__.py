"""Stores run folders and checkpoints, from which a run resumes as if it had never stopped."""

from verbatim.checkpoints.find import find_checkpoint
from verbatim.checkpoints.json_files import read_json, write_json
from verbatim.checkpoints.loop_state import read_loop_state, write_loop_state
from verbatim.checkpoints.origin import Origin, read_origin, write_origin
from verbatim.checkpoints.run_folder import ORCHESTRATOR, TRAINER, RunFolder
from verbatim.checkpoints.seal import find_damage, seal
from verbatim.checkpoints.store import Checkpoint, CheckpointStore
from verbatim.checkpoints.stored_config import CONFIG, load_stored_config

__all__ = [
    "CONFIG",
    "ORCHESTRATOR",
    "TRAINER",
    "Checkpoint",
    "CheckpointStore",
    "Origin",
    "RunFolder",
    "find_checkpoint",
    "find_damage",
    "load_stored_config",
    "read_json",
    "read_loop_state",
    "read_origin",
    "seal",
    "write_json",
    "write_loop_state",
    "write_origin",
]
