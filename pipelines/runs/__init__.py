"""What a run leaves on disk, and how it is found again."""
