"""How the server makes one model of what clients send: the mean, robust rules, noise, a server optimiser."""
