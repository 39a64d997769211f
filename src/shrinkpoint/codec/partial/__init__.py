"""Decodes parts of records: only the chunks that hold the requested values are fetched and decoded."""
