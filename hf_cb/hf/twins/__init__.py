"""The copy of a model that the engine runs, and what it follows of the original."""
