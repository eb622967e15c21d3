"""Pure functions of tensors: losses, prototypes, generators, compression."""
