"""Choosing a compressor: a cost model of steps and links, recommendations, and bits shared out over boundaries."""
