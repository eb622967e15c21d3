"""Networks that make features or images, what they are asked with, and what they are trained by."""
