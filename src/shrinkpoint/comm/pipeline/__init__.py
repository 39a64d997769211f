"""Compressed transfers between the stages of a torch pipeline."""
