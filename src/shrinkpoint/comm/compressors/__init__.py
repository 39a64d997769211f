"""Compressors: how one tensor becomes a message, and a message a tensor."""
