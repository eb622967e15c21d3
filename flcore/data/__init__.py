"""Images, who holds which of them, and in what order they are met."""
