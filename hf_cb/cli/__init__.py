"""The command `hf-cb`: one file per command, and what they share."""
