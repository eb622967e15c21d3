"""The configuration of a run: its sections, its identity and its plug-ins."""
