"""Records to one file, and back. A file is a valid safetensors file; docs/format.md is its specification."""

from shrinkpoint.container.metadata import Entry, RecordHead
from shrinkpoint.container.reader import Damage, FileReader
from shrinkpoint.container.writer import FileWriter, WriteSummary

__all__ = ["Damage", "Entry", "FileReader", "FileWriter", "RecordHead", "WriteSummary"]
