"""Shows a run as a page: an index over its folder, an HTTP API on the loopback, and an export as one HTML file.

The package needs the extra `viewer`; pyarrow and starlette are imported where they are used.
"""
