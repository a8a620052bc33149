"""What plans cost: bytes, memory and times, and the searches among plans that read them."""
