"""Shows runs as a web page: an index of each run folder, an HTTP API on the loopback, and an export to one HTML file.

The package needs the extra `viewer`.
"""
