"""What a call of `generate()` asks, made into requests, and the answer made of their results."""
