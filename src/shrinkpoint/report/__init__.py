"""What stores, runs and files hold: as plain data, and as a page."""
