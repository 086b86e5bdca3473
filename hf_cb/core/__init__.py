"""Scheduling and block accounting: pure Python, no torch."""
