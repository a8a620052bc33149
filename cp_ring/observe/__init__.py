"""What a run did: counters and traces."""
