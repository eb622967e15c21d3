"""One experiment and many runs, written once, and what carries them out; nothing here knows Prefect or a command."""
