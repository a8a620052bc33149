"""Sizes of attention, rates of devices, heads of ranks: what schedules and costs follow from."""
