"""What a run is made of: its preparation, its parts, the processes it runs in, its loop, and its log."""
