"""Images, their division among clients, and task streams."""
