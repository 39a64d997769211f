"""Reports of stores, runs and files as plain data, for tables and for programs; none of them imports torch."""

from shrinkpoint.cli.report.file import FileReport, RoleRow, TensorRow, file_report
from shrinkpoint.cli.report.plain_values import list_plain_values
from shrinkpoint.cli.report.store import (
    CheckpointReport,
    StoreReport,
    checkpoint_report,
    directory_report,
    run_report,
    store_report,
)

__all__ = [
    "CheckpointReport",
    "FileReport",
    "RoleRow",
    "StoreReport",
    "TensorRow",
    "checkpoint_report",
    "directory_report",
    "file_report",
    "list_plain_values",
    "run_report",
    "store_report",
]
