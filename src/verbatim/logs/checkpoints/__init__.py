"""Manages run folders and checkpoints, from which a run resumes as if it had never stopped."""

from verbatim.logs.checkpoints.find import find_checkpoint
from verbatim.logs.checkpoints.hold import ORCHESTRATOR, TRAINER, holding
from verbatim.logs.checkpoints.json_files import read_json, read_record, write_json, write_record
from verbatim.logs.checkpoints.loop_state import read_loop_state, write_loop_state
from verbatim.logs.checkpoints.manifest import find_damage, write_manifest
from verbatim.logs.checkpoints.origin import Origin, read_origin, write_origin
from verbatim.logs.checkpoints.run_folder import RunFolder
from verbatim.logs.checkpoints.store import Checkpoint, CheckpointStore
from verbatim.logs.checkpoints.stored_config import CONFIG, load_stored_config

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
    "holding",
    "load_stored_config",
    "read_json",
    "read_loop_state",
    "read_origin",
    "read_record",
    "write_json",
    "write_loop_state",
    "write_manifest",
    "write_origin",
    "write_record",
]
