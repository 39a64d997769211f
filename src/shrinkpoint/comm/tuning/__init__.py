"""Choice of a compressor: a cost model of training steps, recommendations, and bit allocation over boundaries."""
