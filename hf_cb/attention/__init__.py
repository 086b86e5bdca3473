"""Varlen attention over blocks: the contract, the oracle, the backends."""
