"""Files, locks, records and messages."""
