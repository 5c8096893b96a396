"""The engine: runs rules, prices their edits, arbitrates and ranks."""
