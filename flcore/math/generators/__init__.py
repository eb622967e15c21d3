"""Networks that make features or images, and their losses."""
