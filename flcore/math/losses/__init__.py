"""Loss terms: batch means, pure and shape-stable, the same for one client and for a stack of many."""
