"""How the server folds what clients send: rules that few bad clients cannot move far, noise that hides each one."""
