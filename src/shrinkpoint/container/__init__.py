"""Records to one file, and back. A file is a valid safetensors file; docs/format.md is its specification."""

from shrinkpoint.container.document import Entry, RecordHead
from shrinkpoint.container.reader import Damage, Reader
from shrinkpoint.container.writer import FileSummary, Writer

__all__ = ["Damage", "Entry", "FileSummary", "Reader", "RecordHead", "Writer"]
