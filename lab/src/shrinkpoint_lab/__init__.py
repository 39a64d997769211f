"""The laboratory: what shrinkpoint is compared with and measured by. docs/laboratory.md."""
