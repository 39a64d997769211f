"""Searches in a space of settings: the smallest checkpoint whose measured degradation is accepted."""
