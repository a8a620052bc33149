"""What layers do beside attention: positions, states along the sequence, recomputation."""
