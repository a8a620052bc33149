"""Documents with a long tail: one ring over all ranks beside groups of ranks, by predicted time."""
