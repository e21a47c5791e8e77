"""How a node is: each check against what a real machine shows."""
