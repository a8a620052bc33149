"""Observes a run: counters, traces, times and a watchdog."""
