"""The scheme "fisher": step sizes that follow what the optimizer knows of the loss. docs/fisher_design.md."""

from shrinkpoint.schemes.fisher.scheme import Fisher

__all__ = ["Fisher"]
