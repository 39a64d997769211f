"""Records to one file, and back. A file is a valid safetensors file; docs/format.md is its specification."""

from shrinkpoint.container.metadata import Entry, RecordHead
from shrinkpoint.container.reader import FileReader
from shrinkpoint.container.writer import FileWriter

__all__ = ["Entry", "FileReader", "FileWriter", "RecordHead"]
