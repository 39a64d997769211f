"""Decodes ranges of records: only the chunks that hold the requested values are read and decoded."""
