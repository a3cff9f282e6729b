"""The documentation site: its settings, and the pages and figures that are generated from the code."""
