"""Reports of stores, runs and files: as plain data, and as a page."""
