"""Other simulators doing the work of ``overhead``, each in an environment of its own; they are not dependencies."""
