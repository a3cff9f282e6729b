"""What is run first where a GPU can be had: correctness, speed, a whole run, a comparison. docs/gpu.md says how."""
