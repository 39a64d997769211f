"""Stores and files as plain data, for tables and for programs. No torch: looking is instant."""

from shrinkpoint.report.contents import FileSummary, RoleRow, TensorRow, file_summary
from shrinkpoint.report.folders import FolderSummary, RunSummary, folder_summary, run_summary
from shrinkpoint.report.outline import outline
from shrinkpoint.report.summary import CheckpointSummary, StoreSummary, checkpoint_summary, store_summary

__all__ = [
    "CheckpointSummary",
    "FileSummary",
    "FolderSummary",
    "RoleRow",
    "RunSummary",
    "StoreSummary",
    "TensorRow",
    "checkpoint_summary",
    "file_summary",
    "folder_summary",
    "outline",
    "run_summary",
    "store_summary",
]
